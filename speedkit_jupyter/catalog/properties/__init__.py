"""Changes of objects by plans, in layers that are taken back in any order."""
