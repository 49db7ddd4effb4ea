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

# Steps that a search needs for a clear answer.
ENOUGH_STEPS = 120
# Without a budget of the user's: so many seconds, or as many steps as give a clear answer.
DEFAULT_S, MOST_GROWN_S = 20.0, 900.0
# So many candidates race at once; a candidate takes so long however short the step is.
MOST_CANDIDATES, CANDIDATE_S = 10, 0.06
# The step that was looked at was the fastest of some; in a race it takes longer.
SLOWER = 1.5
# A race may take this share of the budget. A proof is of about so many variants; without a budget
# of the user's there is at least this part of a clear answer's time for it.
RACE, PROVEN, PROOF = 0.35, 3, 0.35


class Allowance:
    """`budget_s` are the user's seconds for all of a search, None for enough.

    `step_s` is about how long a step takes, `budget` the clock since `begin()`.
    """

    def __init__(self, budget_s: float | None) -> None:
        self.budget, self.step_s = Budget(budget_s or DEFAULT_S), 0.0
        self._grows = budget_s is None
        # What the first proof began with, in seconds and variants: it shall get a clear answer.
        self._proof: tuple[float, int] | None = None

    def begin(self, begun_s: float | None) -> None:
        """Start the clock now, or at `begun_s` on it."""
        self.budget = Budget(self.budget.seconds, begun_s=begun_s)

    def is_known_to_take(self, step_s: float) -> None:
        """Note the seconds of a step, as looked at, then as in the rounds, since either may have
        been disturbed; a budget that is not the user's follows them, and leaves time for a proof.
        """
        self.step_s = step_s
        if not self._grows:
            return
        needed_s = self.budget.spent_s + PROOF * self.enough_s
        if self._proof is not None:
            spent_s, variants = self._proof
            needed_s = max(needed_s, spent_s + clear_answer_s(step_s, variants))
        self.budget.seconds = max(DEFAULT_S, min(max(self.enough_s, needed_s), MOST_GROWN_S))

    def leave_time_for_a_proof(self, variants: int) -> None:
        """Let a budget that is not the user's grow, once, to a clear answer about so many."""
        if self._proof is None:
            self._proof = self.budget.spent_s, variants
            self.is_known_to_take(self.step_s)

    def has_time(self, variants: int) -> bool:
        """Return whether a stage of so many beside the baseline could tell anything."""
        steps_s = (1 + variants) * (1 + RACE_ROUNDS) * self.step_s
        return self.budget.is_a_look or self.budget.allows(steps_s)

    def can_check(self) -> bool:
        """Return whether a plan can be timed in a few rounds and checked."""
        checks = REFERENCE + ROUNDED + CHECKED
        return self.budget.allows((checks + 2 * (APART + RACE_ROUNDS)) * self.step_s)

    def room(self) -> int:
        """Return how many candidates a race can take beside the baseline."""
        again = 2 if self.step_s <= LONG_S else 1  # a short step has an untimed one before it
        least_s = max(SLOWER * self.step_s * (APART + again * RACE_ROUNDS), CANDIDATE_S)
        return max(min(int(self.race_s / least_s) - 1, MOST_CANDIDATES), 0)

    @property
    def race_s(self) -> float:
        """Seconds that a race may take: what it leaves is enough for a proof."""
        left_s = self.budget.left_s - clear_answer_s(self.step_s, PROVEN)
        return min(RACE * self.budget.seconds, max(left_s, 0.0))

    @property
    def enough_s(self) -> float:
        """Seconds that a clear answer takes, about."""
        return ENOUGH_STEPS * self.step_s

    def ahead(self) -> str:
        """Return how long the search will take, and whether that is enough."""
        seconds = self.budget.seconds
        text = f"one step takes {self.step_s:.2g} s: about {seconds:.0f} s and what compiling takes"
        return f"{text}; {LONGER}" if seconds < self.enough_s / 2 else text
