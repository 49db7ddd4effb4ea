"""What multiplies in the stead of weights: parts of int8, int4, float8, mx and sparsity."""
