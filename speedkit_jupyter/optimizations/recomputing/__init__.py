"""Parts of `activation_checkpointing`: a second run that finds what the first one found."""
