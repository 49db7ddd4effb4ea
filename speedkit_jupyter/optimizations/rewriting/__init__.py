"""Parts of `rewrites`: modules that can be made others in place, and how they come back."""
