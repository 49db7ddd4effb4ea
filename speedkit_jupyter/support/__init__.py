"""What all else stands on, and what knows nothing of plans."""
