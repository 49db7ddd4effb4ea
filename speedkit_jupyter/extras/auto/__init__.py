"""Plans race on the steps of a training run, each of which trains once."""
