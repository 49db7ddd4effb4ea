"""Race plans on the steps of the user's own training run; each step still trains exactly once."""
