"""Base classes and records of the entries."""
