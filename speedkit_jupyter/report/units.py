"""Seconds, bytes and ratios as people read them."""

from __future__ import annotations

import datetime
import math
from typing import Any


def seconds(value: float, digits: int = 3) -> str:
    """Return `2.31 s`, `45.2 ms`, `310 µs`; from a minute on `3 min 20 s`."""
    if abs(value) >= 60:
        minutes, rest = divmod(round(value), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= scale:
            return f"{_significant(value / scale, digits)} {unit}"
    return f"{_significant(value / 1e-9, digits)} ns"


def with_unit(value: float, unit: str) -> str:
    """Return `1.2 J`, `45.2 mJ`, `3.1 kJ`; a bare number where there is no unit."""
    if not unit:
        return _significant(value, 3)
    for scale, prefix in ((1e3, "k"), (1.0, ""), (1e-3, "m")):
        if abs(value) >= scale:
            return f"{_significant(value / scale, 3)} {prefix}{unit}"
    return f"{_significant(value / 1e-6, 3)} µ{unit}"


def _significant(value: float, digits: int) -> str:
    """Never as a power of ten: `1230` to two digits is `1200`."""
    rounded = float(f"{value:.{max(digits, 1)}g}")
    return f"{rounded:.0f}" if abs(rounded) >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"


def operations(value: float) -> str:
    """Return floating-point operations: `1.21 GFLOP`."""
    for scale, unit in ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} FLOP"


def day(moment: datetime.datetime) -> str:
    """Return `12 May`, with the time on the same day and the year in another; in local time."""
    local, today = moment.astimezone(), datetime.datetime.now().astimezone()
    text = f"{local.day} {local:%b}"
    if local.date() == today.date():
        return f"today {local:%H:%M}"
    return text if local.year == today.year else f"{text} {local.year}"


def size(value: float) -> str:
    """Return `15 GiB`, `24 KiB`."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= scale:
            return f"{_significant(value / scale, 3)} {unit}"
    return f"{value:g} B"


def ratio(value: float) -> str:
    """Return `1.27×`; near 1, where it matters on which side, `1.004×`."""
    if math.isinf(value):
        return "∞"
    return f"{value:.3f}×" if abs(value - 1) < 0.02 else f"{value:.2f}×"


def between(low: float, high: float) -> str:
    """Return `1.20× to 1.26×`; `too few rounds` where an end is not known."""
    if low <= 0 or math.isinf(high):
        return "too few rounds"
    return f"{ratio(low)} to {ratio(high)}"


def word(value: Any) -> str:
    """Return a value in the words of the config: true, false and default, not Python's names."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "default"
    text = str(value)
    return text.removeprefix("torch.") if text else "''"
