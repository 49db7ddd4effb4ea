"""The measured search for the fastest safe plan."""
