"""What a model and its optimizers are: read before anything is decided, and nothing is changed."""
