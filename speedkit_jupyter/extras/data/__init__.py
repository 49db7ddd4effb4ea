"""Loaders, batch sizes, and batches in parts."""
