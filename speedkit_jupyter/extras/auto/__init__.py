"""Race plans (sets of optimizations) on the user's own loops; each step trains exactly once."""
