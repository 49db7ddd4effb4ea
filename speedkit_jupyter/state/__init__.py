"""Find, copy and restore the state that a step may change."""
