"""The time that a search has: the user's budget, or one that follows how long the steps take."""

from __future__ import annotations

from speedkit_jupyter.measure.rounds.budget import (
    APART,
    CHECKED,
    LONGER,
    REFERENCE,
    ROUNDED,
    Budget,
    clear_answer_s,
)
from speedkit_jupyter.measure.rounds.sampler import LONG_S
from speedkit_jupyter.tuning.races import RACE_ROUNDS

# A search needs about this many steps for a clear answer.
ENOUGH_STEPS = 120
# The default budget: at least this many seconds, and at most as many as MOST_GROWN_S.
DEFAULT_S, MOST_GROWN_S = 20.0, 900.0
# The most candidates of one race. Each takes CANDIDATE_S, however short the step is.
MOST_CANDIDATES, CANDIDATE_S = 10, 0.06
# A step in a race takes this many times as long as the fastest one that was looked at.
SLOWER = 1.5
# A race may take RACE of the budget. A proof is of about PROVEN variants. A default budget leaves
# at least PROOF of a clear answer's time for it.
RACE, PROVEN, PROOF = 0.35, 3, 0.35


class Allowance(Budget):
    """The budget of a whole search: the user's `budget_s`, or None for enough.

    `step_s` is about how long a step takes; 0 until one was looked at.
    """

    def __init__(self, budget_s: float | None, begun_s: float | None = None) -> None:
        super().__init__(budget_s or DEFAULT_S, begun_s=begun_s)
        self.step_s = 0.0
        self._grows = budget_s is None
        # The seconds spent when the first proof began, and its variants.
        self._proof: tuple[float, int] | None = None

    def follow(self, step_s: float) -> None:
        """Note the seconds of a step. A default budget follows them, with time for a proof."""
        self.step_s = step_s
        if not self._grows:
            return
        needed_s = self.spent_s + PROOF * self.enough_s
        if self._proof is not None:
            spent_s, variants = self._proof
            needed_s = max(needed_s, spent_s + clear_answer_s(step_s, variants))
        self.seconds = max(DEFAULT_S, min(max(self.enough_s, needed_s), MOST_GROWN_S))

    def leave_time_for_a_proof(self, variants: int) -> None:
        """Let a default budget grow, once, to a clear answer about this many variants."""
        if self._proof is None:
            self._proof = self.spent_s, variants
            self.follow(self.step_s)

    def has_time(self, variants: int) -> bool:
        """Return whether this many variants beside the baseline could tell anything."""
        steps_s = (1 + variants) * (1 + RACE_ROUNDS) * self.step_s
        return self.is_a_look or self.allows(steps_s)

    def can_check(self) -> bool:
        """Return whether a plan can be timed in a few rounds and checked."""
        checks = REFERENCE + ROUNDED + CHECKED
        return self.allows((checks + 2 * (APART + RACE_ROUNDS)) * self.step_s)

    def room(self) -> int:
        """Return how many candidates a race can take beside the baseline."""
        again = 2 if self.step_s <= LONG_S else 1  # a short step has an untimed one before it
        least_s = max(SLOWER * self.step_s * (APART + again * RACE_ROUNDS), CANDIDATE_S)
        return max(min(int(self.race_s / least_s) - 1, MOST_CANDIDATES), 0)

    @property
    def race_s(self) -> float:
        """Seconds that a race may take: what it leaves is enough for a proof."""
        left_s = self.left_s - clear_answer_s(self.step_s, PROVEN)
        return min(RACE * self.seconds, max(left_s, 0.0))

    @property
    def enough_s(self) -> float:
        """About how many seconds a clear answer takes."""
        return ENOUGH_STEPS * self.step_s

    def ahead(self) -> str:
        """Return how long the search will take, and whether that is enough."""
        step = f"one step takes {self.step_s:.2g} s"
        text = f"{step}: about {self.seconds:.0f} s and what compiling takes"
        return f"{text}; {LONGER}" if self.seconds < self.enough_s / 2 else text
