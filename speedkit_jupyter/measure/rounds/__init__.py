"""How times are taken: variants in interleaved rounds, within a budget."""
