"""What a few steps do, seen while they run."""
