"""Plans as source code that does not need SpeedKit."""
