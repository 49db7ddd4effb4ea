"""Training with and without a plan: `verify` and `%speedkit verify`."""
