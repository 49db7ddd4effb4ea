"""Numbers in words."""

from __future__ import annotations


def share(value: float) -> str:
    """Return `43 %`; below one, `0.4 %`."""
    text = f"{value:.0%}" if value >= 0.0095 else f"{value:.1%}"
    return text.replace("%", " %")


def count(number: int, noun: str) -> str:
    """Return `1 flag`, `2 flags`, `422,922 parameters`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
