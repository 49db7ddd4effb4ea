"""How much faster a whole step gets when a part of it does."""

from __future__ import annotations

import math
from typing import NamedTuple

# More of a step is never counted on.
MOST = 0.995


class Gain(NamedTuple):
    """The expected speed-up of the whole step: old time over new time, from `low` to `high`."""

    low: float
    high: float

    @property
    def saved(self) -> float:
        """The share of the time that is expected to go, 0 to 1: the rank."""
        return 1 - (1 / self.low + 1 / self.high) / 2

    def within(self, most: float) -> Gain:
        """Return the part of the range that is not above `most`."""
        return Gain(min(self.low, most), min(self.high, most))

    def __str__(self) -> str:
        return f"{self.low:.2f}× to {self.high:.2f}×"


def amdahl(share: float, least: float, most: float = math.inf) -> Gain:
    """A part that has this share of the step becomes from `least` to `most` times as fast.

    (G. M. Amdahl: Validity of the single processor approach, AFIPS 1967.)
    """
    return Gain(_whole(share, least), _whole(share, most))


def _whole(share: float, times: float) -> float:
    share = min(max(share, 0.0), MOST)
    return 1 / (1 - share + share / times)
