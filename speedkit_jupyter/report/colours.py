"""The colours of tables, pictures and code: legible on white and on near-black.

A word always says the same as a colour does.
"""

from __future__ import annotations

GOOD, BAD, NEUTRAL = "#1f8838", "#da3633", "#737b84"
# Rules between rows, and what code stands on.
GREY = "#808080"
# What a plan changes, and the curve with a plan beside the one without.
CHANGED, PLANNED = "#388bfd", "#1f6feb"
# Of code: comments, keywords, strings, numbers.
COMMENT, KEYWORD, STRING, NUMBER = "#7f848e", "#a855c7", "#2f9e5b", "#c2701d"
# Of the tree of modules, level by level: dark enough for white words.
LEVEL_COLOURS = ("#1158c7", "#2f6f9f")


def rgba(colour: str, opacity: str) -> str:
    """Return CSS for this colour, as opaque as said (0 to 1)."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def tint(colour: str, opacity: str) -> str:
    """Return CSS for a background in this colour that leaves any text on it legible."""
    return f"background:{rgba(colour, opacity)};"
