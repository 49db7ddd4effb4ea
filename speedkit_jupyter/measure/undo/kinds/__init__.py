"""The kinds of state that code can change: one registry, which finding and restoring both ask."""
