"""Loaders, batch sizes, memory to release, batches in parts, batches padded to a few lengths."""
