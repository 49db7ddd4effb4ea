"""The time that a search has: the user's budget, or one that follows how long the steps take."""

from __future__ import annotations

from speedkit_jupyter.measure.rounds.budget import (
    APART,
    REFERENCE,
    ROUNDED,
    Budget,
    advice,
    clear_answer_s,
)
from speedkit_jupyter.measure.rounds.sampler import LONG_S
from speedkit_jupyter.tuning.early_stopping import RACE_ROUNDS

# Steps that a search needs for a clear answer.
ENOUGH_STEPS = 120
# Without a budget of the user's: so many seconds, or as many steps as give a clear answer.
DEFAULT_S, MOST_GROWN_S = 20.0, 900.0
# So many candidates race at once; a candidate takes so long however short the step is.
MOST_CANDIDATES, CANDIDATE_S = 10, 0.06
# The step that was looked at was the fastest of some; in a race it takes longer.
SLOWER = 1.5
# A race may take so many times its share; this part of what is left is always the proof's.
OVERTIME, PROOF = 1.5, 0.35


class Allowance:
    """`budget_s` are the user's seconds for all of a search, None for enough.

    `step_s` is about how long a step takes, `budget` the clock since `begin()`.
    """

    def __init__(self, budget_s: float | None) -> None:
        self.budget, self.step_s = Budget(budget_s or DEFAULT_S), 0.0
        self._grows = budget_s is None
        # What a proof began with, in seconds and variants: it shall get a clear answer, once.
        self._proof: tuple[float, int] | None = None
        self._around_s = 0.0

    def begin(self, begun_s: float | None) -> None:
        """The clock runs from now on, or since `begun_s` on it."""
        self.budget = Budget(self.budget.seconds, begun_s=begun_s)

    def is_known_to_take(self, step_s: float) -> None:
        """Seconds of a step, as looked at, then as in the rounds, since either may have been
        disturbed; a budget that is not the user's follows them, and leaves time for a proof.
        """
        self.step_s = step_s
        if not self._grows:
            return
        needed_s = self.budget.spent_s + PROOF * self.enough_s
        if self._proof is not None:
            spent_s, variants = self._proof
            needed_s = max(needed_s, spent_s + clear_answer_s(step_s, variants))
        self.budget.seconds = max(DEFAULT_S, min(max(self.enough_s, needed_s), MOST_GROWN_S))

    def leave_time_for(self, variants: int) -> None:
        """A clear answer about so many, once, where the budget is not the user's."""
        if self._proof is None:
            self._proof = self.budget.spent_s, variants
            self.is_known_to_take(self.step_s)

    def goes_around_stages(self, seconds: float) -> None:
        """What each stage takes to copy the state and to put it back."""
        self._around_s = max(self._around_s, seconds)

    def has_time(self, variants: int) -> bool:
        """Whether a stage of so many beside the baseline could tell anything."""
        steps_s = (1 + variants) * (1 + RACE_ROUNDS) * self.step_s
        return self.budget.is_a_look or self.budget.allows(self._around_s + steps_s)

    def room(self, share: float, others: int, is_first: bool) -> int:
        """How many candidates a race of this share of the budget can take beside baseline and so
        many others. What the first goes by is kept for the next.
        """
        seconds = min(share * self.budget.seconds, self._beside_a_proof_s)
        again = 2 if self.step_s <= LONG_S else 1  # a short step has an untimed one before it
        least_s = max(SLOWER * self.step_s * (APART + again * RACE_ROUNDS), CANDIDATE_S)
        check = REFERENCE + ROUNDED if is_first else 1
        others_s = check * self.step_s + (1 + others) * least_s
        return max(min(int((seconds - others_s) / least_s), MOST_CANDIDATES), 0)

    def for_a_race(self, share: float) -> float:
        """Seconds. More than was planned for, if need be: without rounds enough all of it would be
        lost.
        """
        return min(OVERTIME * share * self.budget.seconds, self._beside_a_proof_s)

    @property
    def enough_s(self) -> float:
        """What a clear answer takes, about."""
        return ENOUGH_STEPS * self.step_s

    def more(self) -> str:
        """What may give a clear answer, or how long one would take."""
        return advice(self.enough_s, "may settle it", "settling it", self.budget.seconds)

    @property
    def _beside_a_proof_s(self) -> float:
        return (1 - PROOF) * self.budget.left_s
