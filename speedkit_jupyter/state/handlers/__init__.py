"""Handlers, one for each kind of state: they find, copy, compare and restore the state."""
