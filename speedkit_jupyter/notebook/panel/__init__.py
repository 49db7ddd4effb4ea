"""The panel: a view of plans, contexts and benchmarks, with core ipywidgets only."""
