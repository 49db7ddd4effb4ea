"""Find, copy, compare and restore state, with one handler for each kind of state."""
