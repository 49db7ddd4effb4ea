"""Reversible changes to models: calls, compiled code, tensors, attributes."""
