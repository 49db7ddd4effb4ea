"""Parts of `precision`, and of all that has to do with autocast."""
