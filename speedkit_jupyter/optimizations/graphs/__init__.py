"""Parts of `cuda_graphs`: calls that are recorded, and replayed."""
