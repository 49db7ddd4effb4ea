"""How much faster a whole step gets when a part of it does."""

from __future__ import annotations

import math
from typing import NamedTuple

# No remedy is expected to remove more of a step than this.
MOST = 0.995


class Gain(NamedTuple):
    """The expected speed-up of the whole step: old time over new time, from `low` to `high`."""

    low: float
    high: float

    @property
    def saved(self) -> float:
        """Return the share of the time that is expected to go, 0 to 1: opportunities' order."""
        return 1 - (1 / self.low + 1 / self.high) / 2

    def within(self, most: float) -> Gain:
        """Return the part of the range that is not above `most`."""
        return Gain(min(self.low, most), min(self.high, most))

    def __str__(self) -> str:
        return f"{self.low:.2f}× to {self.high:.2f}×"


def amdahl(share: float, least: float, most: float = math.inf) -> Gain:
    """Return the gain where a part with this share gets `least` to `most` times as fast.

    (G. M. Amdahl: Validity of the single processor approach, AFIPS 1967.)
    """
    share = min(max(share, 0.0), MOST)
    return Gain(1 / (1 - share + share / least), 1 / (1 - share + share / most))


def without(share: float) -> float:
    """Return the speed-up of the step where a part with this share goes."""
    return amdahl(share, math.inf).low
