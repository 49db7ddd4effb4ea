"""What replaces slow code of a model: a function with the same result, and less work."""
