"""Loaders, batch sizes, memory to release, and batches in parts."""
