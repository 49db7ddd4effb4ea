"""Parts of `inference`: the calls of a model that only predicts."""
