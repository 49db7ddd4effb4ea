"""Switches that act on request only: quantized linear layers, and recomputed activations."""
