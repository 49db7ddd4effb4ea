"""What was found, and how sure it is."""
