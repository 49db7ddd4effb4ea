"""Race plans on the steps of the user's own loops; a training step still trains exactly once."""
