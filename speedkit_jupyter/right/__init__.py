"""Check results: observe a step, compare it with a reference, measure deviations, judge."""
