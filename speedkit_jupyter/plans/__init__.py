"""From what is asked for to a plan that is in force, and back."""
