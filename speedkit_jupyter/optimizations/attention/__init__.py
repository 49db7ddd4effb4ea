"""Parts of `sdpa`: torch's switches for its kernels, packages of them, and what each took."""
