"""The panel: a view on plans, contexts and benchmarks, with core ipywidgets only."""
