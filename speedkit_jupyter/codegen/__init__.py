"""Plans as code that knows nothing of SpeedKit."""
