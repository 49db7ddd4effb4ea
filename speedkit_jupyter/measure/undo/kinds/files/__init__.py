"""Files, descriptors and streams."""
