"""Replacements of slow code in a model: functions with the same result and less work."""
