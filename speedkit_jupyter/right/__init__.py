"""Check results: observer, reference, tolerance, judge."""
