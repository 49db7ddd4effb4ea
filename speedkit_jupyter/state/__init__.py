"""The state that a step may change: found, copied, put back."""
