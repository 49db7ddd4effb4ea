"""Tensors, other numbers, and the generators that draw them."""
