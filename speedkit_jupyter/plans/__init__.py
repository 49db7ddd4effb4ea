"""Turn the user's config into a plan, apply the plan, and undo it."""
