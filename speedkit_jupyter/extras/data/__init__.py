"""Loaders, batch sizes, memory to release, batches in parts, and batches padded to few lengths."""
