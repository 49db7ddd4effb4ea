"""What torch.compile did in a session, why, and what to do about it."""
