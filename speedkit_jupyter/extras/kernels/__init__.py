"""Attention with patterns, users' own kernels as optimizations, and whole steps as CUDA graphs."""
