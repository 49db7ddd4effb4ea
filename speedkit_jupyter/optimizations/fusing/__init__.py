"""Parts of `fused_kernels`: Liger, and the calls of modules that it has kernels for."""
