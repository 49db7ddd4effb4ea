"""Facts about models and optimizers."""
