"""Check a rewritten function: does it compute the same as its reference, and how fast?"""
