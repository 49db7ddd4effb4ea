"""What a step gives, as values that can be compared."""
