"""From the user's config to a plan in force, and back."""
