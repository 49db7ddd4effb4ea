"""Check results: observer, reference, deviations, judge."""
