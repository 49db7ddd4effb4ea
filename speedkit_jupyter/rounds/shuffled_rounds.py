"""Shuffled rounds: each round times every contender once, in a new order."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from speedkit_jupyter.rounds.statistics import error_of_a_look, planned_looks

T = TypeVar("T")
# Minimum length of a block in seconds. Switching contenders takes 1 to 2 ms outside the timed
# steps. With this length, at least 80 % of the time is measured.
BLOCK_S = 0.01


def block_length(step_s: float, block_s: float = BLOCK_S) -> int:
    """Return the number of steps of `step_s` seconds in a block of `block_s`, at least 1."""
    return max(1, math.ceil(block_s / max(step_s, 1e-7)))


class ShuffledRounds(Generic[T]):
    """Iterate over rounds: lists of the contenders in a new order, which the caller times.

    A slow phase of the machine affects all contenders alike, so ratios within rounds stay valid.

    Args:
        racing: The contenders. The caller may remove some between rounds; the rounds end if none
            are left.
        left_s: A function that returns the remaining seconds. A round begins only if a round as
            long as the last would fit. None sets no limit; `is_look` needs a limit.
        least: The number of rounds that run even if no time is left.
        most: The largest number of rounds, including rounds that were left out. The default limits
            the rounds if a coarse clock measures no time.
        comparisons: Number of intervals per test: one for each contender except the baseline.
        generator: The random generator that shuffles the contenders. The default is not Python's
            global generator, which the step may use.

    Attributes:
        number: The number of the current round, from 1, without rounds that were left out.
        looks: The rounds after which intervals may be tested, planned after the first round.
        round_s: Mean seconds of a round; None before `is_look` was called.
        has_ended: Whether no round follows, so that the next test is the last.
    """

    def __init__(
        self,
        racing: Sequence[T],
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
        """Yield the contenders of each round in the order of timing."""
        while self._taken < self._most:
            left_s, order = self._left_s(), list(self._racing)
            if not order or (self.number >= self._least and self._last_s > left_s):
                break
            self._generator.shuffle(order)
            self.number, self._taken = self.number + 1, self._taken + 1
            yield order
            self._last_s = left_s - self._left_s()
        self.has_ended = True

    @property
    def error(self) -> float:
        """Return the allowed probability of a false verdict at the current test."""
        return error_of_a_look(len(self.looks), self.has_ended)

    def is_look(self) -> bool:
        """Return whether intervals may be tested after the current, complete round.

        The call also sets `round_s`. After the first round it plans `looks`, whose number decides
        the error probability of each test.
        """
        self.round_s = (self._all_s - self._left_s()) / self._taken
        if self.number == 1:
            more = min(self._left_s() / max(self.round_s, 1e-9), self._most - self._taken)
            self.looks = planned_looks(int(self.number + more), self._comparisons)
        return self.number in self.looks

    def leave_out(self) -> None:
        """Exclude the current round, because not every contender has a time."""
        self.number -= 1

    def end(self) -> None:
        """End the iteration before the next round."""
        self._most, self.has_ended = self._taken, True
