"""Measure how the time of a step divides into parts, lines and operations."""
