"""Loaders, batch sizes, batches in parts, and memory."""
