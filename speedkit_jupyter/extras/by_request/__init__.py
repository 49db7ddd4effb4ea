"""Switches that act on request only: quantized weights, and recomputed activations."""
