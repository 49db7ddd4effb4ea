"""Parts of `linear_cross_entropy`: logits that are computed where they are asked for."""
