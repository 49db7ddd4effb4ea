"""Tune loaders and batch sizes, release memory, split batches and pad them to a few lengths."""
