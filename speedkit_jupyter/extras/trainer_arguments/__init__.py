"""Arguments of transformers' Trainer, tried by `%speedkit advise trainer`."""
