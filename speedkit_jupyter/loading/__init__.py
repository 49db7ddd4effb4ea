"""The user's DataLoader: measured against the user's step, and rebuilt."""
