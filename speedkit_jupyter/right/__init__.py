"""Is a result right: observer, reference, tolerance, judge."""
