"""What of a benchmark fits into its budget: how many variants, and how much is examined."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from speedkit_jupyter.measure import dropping
from speedkit_jupyter.measure.budget import (
    LATEST,
    OVERHEAD_S,
    REFERENCE,
    ROUNDED,
    Budget,
    advice,
    clear_answer_s,
    few_digits,
)
from speedkit_jupyter.measure.dropping import Drop
from speedkit_jupyter.measure.runner import Runner
from speedkit_jupyter.measure.statistics import ERROR, LAST_LOOK, least_pairs

# A budget that is not the user's grows with the step up to so many seconds.
MOST_GROWN_S = 600.0
# Below so many seconds a budget is for a look at a short step: then nothing is left out.
LEAST_S = 3.0
# Memory and limits are measured anyway where that takes no longer than so many seconds.
SHORT_CHECK_S = 0.3


class Pace:
    """Goes by `budget`; where it `grows`, by the time that a clear answer takes."""

    def __init__(
        self,
        seconds: float,
        now: Callable[[], float] | None = None,
        drop: Drop = "",
        grows: bool = False,
    ) -> None:
        self.budget, self._drop, self._grows = Budget(seconds, now), drop, grows

    def grow(self, step_s: float, variants: int) -> None:
        """Time enough for a clear answer, where the budget is not the user's."""
        if self._grows:
            grown = min(clear_answer_s(step_s, variants), MOST_GROWN_S)
            self.budget.seconds = max(self.budget.seconds, grown)

    def ahead(self, runners: Sequence[Runner]) -> str:
        """How long it will take, said as soon as one step has been seen."""
        step_s, budget_s = runners[0].step_s, self.budget.seconds
        compiled = sum(bool(one.record.applied.get("compile")) for one in runners)
        text = f"one step takes {step_s:.2g} s: about {max(budget_s, OVERHEAD_S):.0f} s"
        text += f" and the compiling of {compiled}" if compiled else ""
        needed_s = clear_answer_s(step_s, len(runners))
        if needed_s <= budget_s or self._drop not in ("", "far"):
            return f"{text}; "
        more = advice(needed_s, "would do", "a clear one", budget_s)
        runners[0].record.notes["budget"] = (
            f"one step takes {step_s:.2g} s: {few_digits(budget_s)} s are short for a clear answer "
            f"about {_variants(len(runners))}; {more}"
        )
        return f"{text}, short for a clear answer ({more}); "

    def leave_out(self, runner: Runner) -> None:
        """Not measured, and that is said."""
        short = f"{few_digits(self.budget.seconds)} s are too short"
        runner.record.notes["dropped"] = f"left out: {short} for so many variants of this step"
        runner.warm = None

    def within(self, runners: Sequence[Runner]) -> list[Runner]:
        """As many as can be checked and told apart in the time that is left; two at least."""
        kept = list(runners)
        while len(kept) > 2 and not self.has_time_to_check(kept):
            slowest = max(kept[1:], key=lambda one: one.fastest_s)
            hopeless = slowest.fastest_s > dropping.FAR * kept[0].fastest_s
            kept.remove(slowest if hopeless else kept[-1])
        names = [id(one) for one in kept]
        for one in runners:
            if id(one) not in names:
                self.leave_out(one)
        return kept

    def has_time_to_check(self, runners: Sequence[Runner]) -> bool:
        """And for rounds enough to tell anything; else there is nothing that could be wrong.

        A check that is as short as the least of budgets is always made.
        """
        if self.budget.seconds < LEAST_S and self._check_s(runners) < LEAST_S:
            return True
        return self._needed_s(runners) <= self.budget.left_s * LATEST

    def has_time_for_limits(self, runners: Sequence[Runner]) -> bool:
        """Beside the rounds, which come first; where there is none, that is said."""
        steps_s = 2 * sum(one.fastest_s for one in runners) + 2 * runners[0].fastest_s
        left_s = self.budget.left_s - self._rounds_s(runners)
        anyway_s = LEAST_S if self.budget.seconds < LEAST_S else SHORT_CHECK_S
        has = steps_s <= max(left_s, anyway_s)
        if not has:
            note = "memory and limits were left out, since the budget is short"
            runners[0].record.notes["limits"] = note
        return has

    def _needed_s(self, runners: Sequence[Runner]) -> float:
        """For the check, and for rounds enough."""
        return self._check_s(runners) + self._rounds_s(runners)

    def _check_s(self, runners: Sequence[Runner]) -> float:
        first, *others = runners
        rounded = {one.precision for one in others} - {first.precision}
        of_baseline = REFERENCE + ROUNDED * len(rounded)
        return of_baseline * first.fastest_s + sum(one.fastest_s for one in runners)

    def _rounds_s(self, runners: Sequence[Runner]) -> float:
        least = least_pairs(ERROR * LAST_LOOK / max(len(runners) - 1, 1))
        least = dropping.RACE_ROUNDS if self._drop == "race" else least
        return least * sum(one.fastest_s for one in runners)


def _variants(number: int) -> str:
    return "1 variant" if number == 1 else f"{number} variants"
