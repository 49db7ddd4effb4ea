"""Shuffled rounds: every contender is timed once a round, in a new order each time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from speedkit_jupyter.rounds.statistics import error_of_a_look, planned_looks

T = TypeVar("T")
# Seconds of a block at least. Switching contenders takes 1 to 2 ms around a block, outside of the
# timed steps; with blocks of this length at least 80 % of the time is measured.
BLOCK_S = 0.01


def block_length(step_s: float, block_s: float = BLOCK_S) -> int:
    """Return how many steps of `step_s` seconds fill a block of `block_s` seconds, 1 or more."""
    return max(1, math.ceil(block_s / max(step_s, 1e-7)))


class ShuffledRounds(Generic[T]):
    """Iterate over rounds, each a new order of the contenders; the caller times a block of each.

    A slow spell of the machine then hits all contenders alike, and ratios within a round hold.

    Args:
        racing: Returns the contenders of the next round; without any the rounds end.
        left_s: Returns the seconds that are left. A round begins only where the last one would
            still fit. None sets no limit; looks need one.
        least: The number of rounds that run even if no time is left.
        most: The largest number of rounds, including left out ones. The default ends rounds that
            take no time by a coarse clock.
        comparisons: Intervals that a look takes: one for each contender but the baseline.
        generator: The random generator that shuffles the contenders. The default is independent of
            the user's, which is part of the state of a step.

    Attributes:
        number: The number of the current round, from 1, without left out ones.
        looks: The rounds after which intervals may be looked at, planned after the first round.
        round_s: Mean seconds of a round; None before the first look is asked for.
        has_ended: Whether the next look is the last one.
    """

    def __init__(
        self,
        racing: Callable[[], Sequence[T]],
        left_s: Callable[[], float] | None = None,
        *,
        least: int = 1,
        most: int = 20_000,
        comparisons: int = 1,
        generator: random.Random | None = None,
    ) -> None:
        self._racing, self._left_s = racing, left_s or (lambda: math.inf)
        self._least, self._most, self._comparisons = least, most, comparisons
        self._generator = generator or random.Random(0)
        self._taken, self._last_s = 0, 0.0
        self._all_s = self._left_s()
        self.number, self.looks, self.has_ended = 0, tuple[int, ...](), False
        self.round_s: float | None = None

    def __iter__(self) -> Iterator[list[T]]:
        """Yield the contenders of each round in the order in which they are to be timed."""
        while self._taken < self._most:
            left_s, order = self._left_s(), list(self._racing())
            if not order or (self.number >= self._least and self._last_s > left_s):
                break
            self._generator.shuffle(order)
            self.number, self._taken = self.number + 1, self._taken + 1
            yield order
            self._last_s = left_s - self._left_s()
        self.has_ended = True

    @property
    def error(self) -> float:
        """Return the probability of a false verdict that the present look may have."""
        return error_of_a_look(len(self.looks), self.has_ended)

    def is_look(self) -> bool:
        """Return whether intervals may be tested after the current, complete round.

        Tests are planned after the first round, before any result is known, so that their number
        is part of the error probability.
        """
        self.round_s = (self._all_s - self._left_s()) / self._taken
        if self.number == 1:
            more = min(self._left_s() / max(self.round_s, 1e-9), self._most - self._taken)
            self.looks = planned_looks(int(self.number + more), self._comparisons)
        return self.number in self.looks

    def leave_out(self) -> None:
        """Don't count the round at hand: not every contender has a time."""
        self.number -= 1

    def end(self) -> None:
        """End before the next round, where no look decides that."""
        self._most, self.has_ended = self._taken, True
