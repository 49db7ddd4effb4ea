"""The version, for results to say which engine found them."""

from __future__ import annotations

__version__ = "0.1.0"
