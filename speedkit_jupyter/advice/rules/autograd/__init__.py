"""Gradients, graphs and models that are computed for nothing."""
