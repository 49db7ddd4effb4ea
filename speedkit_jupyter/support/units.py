"""Seconds, bytes, ratios, shares and counts as text for users."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from typing import Any

# An interval whose ends differ by a larger factor is not shown: it supports no conclusion.
WIDE = 3.0
SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
BYTES = {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}


def seconds(value: float, digits: int = 3) -> str:
    """Return a time in seconds as text: `310 µs`, `45.2 ms`, `2.31 s`, `3 min 20 s`."""
    if abs(value) < 60:
        return _scaled(value, SECONDS, digits)
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def size(value: float) -> str:
    """Return a number of bytes as text: `15 GiB`, `24 KiB`."""
    return _scaled(value, BYTES)


def _scaled(value: float, units: Mapping[str, float], digits: int = 3) -> str:
    """Return a value in the largest unit that fits, without an exponent."""
    smallest = list(units)[-1]
    unit = next((unit for unit, scale in units.items() if abs(value) >= scale), smallest)
    rounded = float(f"{value / units[unit]:.{max(digits, 1)}g}")
    whole = abs(rounded) >= 10 ** (digits - 1)
    return f"{rounded:.0f} {unit}" if whole else f"{rounded:.{digits}g} {unit}"


def day(moment: datetime.datetime) -> str:
    """Return a UTC time as `2026-05-12 14:03` in local time."""
    return f"{moment.astimezone():%Y-%m-%d %H:%M}"


def ratio(value: float) -> str:
    """Return a ratio as `1.27×`; within 0.02 of 1 as `1.004×`; infinity as `∞`."""
    if math.isinf(value):
        return "∞"
    return f"{value:.3f}×" if abs(value - 1) < 0.02 else f"{value:.2f}×"


def between(low: float, high: float) -> str:
    """Return an interval as `1.20× to 1.26×`; `too few rounds` if wider than the factor WIDE."""
    return "too few rounds" if high > WIDE * low else f"{ratio(low)} to {ratio(high)}"


def word(value: Any) -> str:
    """Return a value as text: `true`, `false`, `default` for None, `float32` for torch.float32."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "default"
    return str(value).removeprefix("torch.") or "''"


def share(value: float) -> str:
    """Return a share as `43 %`; below one percent as `0.4 %`."""
    text = f"{value:.0%}" if value >= 0.0095 else f"{value:.1%}"
    return text.replace("%", " %")


def number(value: float) -> str:
    """Return a number with three significant digits, `2.57`; from 100 on as an integer, `1,170`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def count(number: int, noun: str) -> str:
    """Return a number and its noun: `1 flag`, `2 flags`, `422,922 parameters`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
