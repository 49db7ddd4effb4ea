"""Attention with patterns, the user's own kernels as optimizations, whole steps as CUDA graphs."""
