"""The time that a search has: the user's budget, or one that follows how long the steps take."""

from __future__ import annotations

from speedkit_jupyter.measure.rounds.budget import (
    APART,
    REFERENCE,
    ROUNDED,
    Budget,
    clear_answer_s,
)
from speedkit_jupyter.measure.rounds.sampler import LONG_S
from speedkit_jupyter.tuning.policies import RACE_ROUNDS

# Steps that a search needs for a clear answer.
ENOUGH_STEPS = 120
# Without a budget of the user's: so many seconds, or as many steps as give a clear answer.
DEFAULT_S, MOST_GROWN_S = 20.0, 900.0
# So many candidates race at once; a candidate takes so long however short the step is.
MOST_CANDIDATES, CANDIDATE_S = 10, 0.06
# The step that was looked at was the fastest of some; in a race it takes longer.
SLOWER = 1.5
# A race may take this share of the budget; this part of what is left is always the proof's.
RACE, PROOF = 0.35, 0.35


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

    def room(self) -> int:
        """Return how many candidates a race can take beside the baseline."""
        again = 2 if self.step_s <= LONG_S else 1  # a short step has an untimed one before it
        least_s = max(SLOWER * self.step_s * (APART + again * RACE_ROUNDS), CANDIDATE_S)
        others_s = (REFERENCE + ROUNDED) * self.step_s + least_s
        return max(min(int((self.race_s - others_s) / least_s), MOST_CANDIDATES), 0)

    @property
    def race_s(self) -> float:
        """Seconds that a race may take."""
        return min(RACE * self.budget.seconds, (1 - PROOF) * self.budget.left_s)

    @property
    def enough_s(self) -> float:
        """Seconds that a clear answer takes, about."""
        return ENOUGH_STEPS * self.step_s
