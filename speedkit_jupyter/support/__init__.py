"""What all else stands on, and what knows nothing of plans."""

__version__ = "0.1.0"
