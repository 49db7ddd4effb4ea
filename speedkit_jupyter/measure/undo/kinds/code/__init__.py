"""What code says, names and binds."""
