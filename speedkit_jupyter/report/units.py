"""Seconds, bytes and ratios as people read them."""

from __future__ import annotations

import math
from typing import Any


def seconds(value: float) -> str:
    """`2.31 s`, `45.2 ms`, `310 µs`."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def size(value: float) -> str:
    """`15.0 GiB`, `24 KiB`."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:g} B"


def ratio(value: float) -> str:
    """`1.27×`; near 1, where it matters on which side, `1.004×`."""
    if math.isinf(value):
        return "∞"
    return f"{value:.3f}×" if abs(value - 1) < 0.02 else f"{value:.2f}×"


def count(number: int, noun: str) -> str:
    """`1 flag`, `2 flags`, `422,922 parameters`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def word(value: Any) -> str:
    """A value in the words of the config: true, false and default in place of Python's names."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "default"
    text = str(value)
    return text.removeprefix("torch.") if text else "''"
