"""What a notebook holds in memory without its user's doing, and letting go of it."""
