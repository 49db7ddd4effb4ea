"""Measure variants of one step in shuffled rounds, with intervals, verdicts and checks."""
