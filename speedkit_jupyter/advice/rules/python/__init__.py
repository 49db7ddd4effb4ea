"""Python, between and instead of torch's operators."""
