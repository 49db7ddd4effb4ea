"""Is a result right? Observe it, compare it with a reference, measure deviations, judge."""
