"""Base classes and records of the catalog's optimizations."""
