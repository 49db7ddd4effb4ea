"""The number that the user names: what it was, what a plan makes of it, what is allowed."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from speedkit_jupyter.measure.results.statistics import ERROR

Better = Literal["higher", "lower"]

# Without a word of the user's: what MLPerf allows a quantized model, 99 % of the number that it has
# in full precision.
SHARE = 0.01
# Of models that were trained: so many times as far as another baseline's number lies.
YARDSTICKS = 2.0
# What decimal fractions leave behind: 0.912 - 0.902 is a little more than 0.01.
EDGE = 1e-9
# No draw more of the yardstick explains a loss of so many times what is allowed.
FAR = 10.0


@dataclass(frozen=True)
class Score:
    """One number; where it is a share, the number of examples that are `right`, of how many."""

    value: float
    right: int | None = None
    examples: int | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The share among all examples of their kind (Wilson's interval); None where not known."""
        if self.examples is None or self.right is None:
            return None
        from scipy.stats import binomtest

        test = binomtest(self.right, self.examples)
        interval = test.proportion_ci(1 - ERROR, method="wilson")
        return interval.low, interval.high


@dataclass(frozen=True)
class Scored:
    """What a function of the user's gave for the model as it is, and under a plan.

    `after` is None where it gave nothing, and `failure` says why. `asked` is how much worse it may
    be, in its own units, where the user said so; `others` are the numbers of other baselines.
    """

    function: str
    before: Score
    after: Score | None
    better: Better = "higher"
    asked: float | None = None
    others: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def lost(self) -> float:
        """By how much it is worse under the plan; below 0 where it is better."""
        if self.after is None:
            return math.inf
        lost = self.before.value - self.after.value
        return lost if self.better == "higher" else -lost

    @property
    def spread(self) -> float:
        """How far the other baseline lies that is farthest from the first."""
        return max((abs(other - self.before.value) for other in self.others), default=0.0)

    @property
    def allowed(self) -> float:
        """How much worse it may be."""
        if self.asked is not None:
            return self.asked
        return max(SHARE * abs(self.before.value), YARDSTICKS * self.spread)

    @property
    def is_accepted(self) -> bool:
        """Whether no more was given up than is allowed."""
        return self.lost <= self.allowed + EDGE * abs(self.before.value)

    @property
    def is_open(self) -> bool:
        """Whether another baseline may lie as far from the first as the plan does."""
        mine = self.asked is None and self.after is not None
        return mine and not self.is_accepted and self.lost <= FAR * self.allowed

    def to_dict(self) -> dict[str, Any]:
        """Plain values, and what follows from them."""
        lost = self.lost if self.after is not None else None
        derived = {"lost": lost, "allowed": self.allowed, "accepted": self.is_accepted}
        return asdict(self) | derived
