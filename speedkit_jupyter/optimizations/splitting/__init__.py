"""Parts of `micro_batches`: a call of a model, made with some of its samples at a time."""
