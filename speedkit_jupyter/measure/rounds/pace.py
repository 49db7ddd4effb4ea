"""What of a benchmark fits into its budget: how many variants, and how much is examined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from speedkit_jupyter.measure.checks import compilations
from speedkit_jupyter.measure.checks.trials import CALLS
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.budget import (
    LATEST,
    OVERHEAD_S,
    REFERENCE,
    ROUNDED,
    Budget,
    OutOfTime,
    advice,
    clear_answer_s,
    few_digits,
)
from speedkit_jupyter.measure.rounds.policy import Policy
from speedkit_jupyter.measure.rounds.runner import Runner

# A variant this many times slower is hopeless.
FAR = 2.0
# A budget that is not the user's grows with the step up to so many seconds.
MOST_GROWN_S = 600.0
# What is measured of the machine takes so long beside the steps: products in each precision, a
# copy. Where all is as short as this, a budget for a look has it too.
LIMITS_S, SHORT_CHECK_S = 0.8, 3.0


class Pace:
    """Goes by `budget`; where it `grows`, by the time that a clear answer takes."""

    def __init__(
        self,
        seconds: float,
        now: Callable[[], float] | None = None,
        policy: Policy | None = None,
        grows: bool = False,
        within: Budget | None = None,
        begun_s: float | None = None,
    ) -> None:
        self._policy = policy or Policy()
        self.budget = Budget(seconds, now, within, begun_s)
        self._grows, self._is_part = grows, within is not None
        # The longest of each so far: an untimed step by its variant, and what lies between two.
        self._untimed_s: dict[int, float] = {}
        self._between_s = 0.0

    def grow(self, step_s: float, variants: int) -> None:
        """Time enough for a clear answer, where the budget is not the user's."""
        if self._grows:
            grown = min(clear_answer_s(step_s, variants), MOST_GROWN_S)
            self.budget.seconds = max(self.budget.seconds, grown)

    def ahead(self, runners: Sequence[Runner]) -> str:
        """How long it will take, said as soon as one step has been seen."""
        step_s, budget_s = runners[0].step_s, self.budget.seconds
        compiled = sum(runner.record.is_compiled for runner in runners)
        text = f"one step takes {step_s:.2g} s: about {max(budget_s, OVERHEAD_S):.0f} s"
        text += f" and the compiling of {compiled}" if compiled else ""
        needed_s = clear_answer_s(step_s, len(runners))
        if needed_s <= budget_s or self._policy.chooses:
            return f"{text}; "
        more = advice(needed_s, "may give one", "a clear one", budget_s)
        runners[0].record.notes["budget"] = (
            f"one step takes {step_s:.2g} s: {few_digits(budget_s)} s are short for a clear answer "
            f"about {_variants(len(runners))}; {more}"
        )
        return f"{text}, short for a clear answer ({more}); "

    @contextmanager
    def examining(self, runners: Sequence[Runner], note: Callable[[], object]) -> Iterator[None]:
        """Untimed steps: none of them is begun that would, by those before, end too late.

        Then the block ends there, and `note` says what is missing. What they compile is excluded.
        """
        ended_s: float | None = None

        @contextmanager
        def timed(runner: Runner) -> Iterator[None]:
            nonlocal ended_s
            begun_s, graphs = clock.now(), compilations.graphs()
            if ended_s is not None:
                self._between_s = max(self._between_s, begun_s - ended_s)
            usual_s = self._untimed_s.get(id(runner), runner.worst_s)
            if not self.budget.allows(usual_s + self._between_s):
                raise OutOfTime
            try:
                yield
            finally:
                ended_s = clock.now()
                took_s = ended_s - begun_s
                if compilations.graphs() > graphs:
                    self.budget.exclude(took_s - usual_s)
                    took_s = usual_s
                self._untimed_s[id(runner)] = max(usual_s, took_s)

        for runner in runners:
            runner.around_step = timed
        try:
            yield
        except OutOfTime:
            note()
        finally:
            for runner in runners:
                runner.around_step = None

    @contextmanager
    def keeping_rounds(self, runners: Sequence[Runner]) -> Iterator[None]:
        """In the block the time for rounds enough is in reserve."""
        rounds_s = self._rounds_s(runners)
        self.budget.reserved_s += rounds_s
        try:
            yield
        finally:
            self.budget.reserved_s -= rounds_s

    @contextmanager
    def keeping_checks(self, runners: Sequence[Runner]) -> Iterator[None]:
        """In the block the time for the checks is in reserve, beside rounds enough to tell."""
        left_s = self.budget.left_s - self._rounds_s(runners)
        checks_s = max(min(self._check_s(runners), left_s), 0.0)
        self.budget.reserved_s += checks_s
        try:
            yield
        finally:
            self.budget.reserved_s -= checks_s

    def leave_out(self, runner: Runner, first: Runner | None = None) -> None:
        """Not measured, and that is said: beside the `first`, where it has run."""
        short = f"{few_digits(self.budget.seconds)} s are too short"
        if self._is_part:  # of a search: seconds that nobody has given
            short = "what was left of the budget is too short"
        note = f"{short} for so many variants of this step"
        times = runner.fastest_s / first.fastest_s if first and first.fastest_s else 0.0
        if first and times > FAR:
            note = f"far slower than {first.record.name}: {times:.1f} times in its fastest step; "
            note += f"{short} to time it"
        runner.record.notes["left out"] = note
        runner.warm = None

    def within(self, runners: Sequence[Runner]) -> list[Runner]:
        """As many as can be checked and told apart in the time that is left; two at least."""
        return self.as_many(runners, self.has_time_to_check)

    def as_many(
        self, runners: Sequence[Runner], is_time: Callable[[Sequence[Runner]], bool]
    ) -> list[Runner]:
        """As there `is_time` for; two at least: first what is hopeless leaves, then what is last.

        Of two only the first where the other is so slow that not even one round would fit.
        """
        kept = list(runners)
        while len(kept) > 1 and not is_time(kept):
            slowest = max(kept[1:], key=lambda runner: runner.fastest_s)
            hopeless = slowest.fastest_s > FAR * kept[0].fastest_s
            if len(kept) == 2 and not (hopeless and self._is_no_round_left(kept)):
                break
            kept.remove(slowest if hopeless else kept[-1])
        names = [id(runner) for runner in kept]
        for runner in runners:
            if id(runner) not in names:
                self.leave_out(runner, kept[0])
        return kept

    def _is_no_round_left(self, runners: Sequence[Runner]) -> bool:
        return not self.budget.allows(sum(runner.worst_s for runner in runners))

    def has_time_to_check(self, runners: Sequence[Runner]) -> bool:
        """And for rounds enough to tell anything; else there is nothing that could be wrong.

        In a look, a short check is always made.
        """
        if self.budget.is_a_look and self._check_s(runners) < SHORT_CHECK_S:
            return True
        return self._needed_s(runners) <= self.budget.left_s * LATEST

    def has_time_for_limits(self, runners: Sequence[Runner]) -> bool:
        """Beside the rounds, which come first; where there is none, that is said."""
        each_s = [runner.worst_s + self._between_s for runner in (*runners, runners[0])]
        steps_s = 2 * sum(each_s) + (0.0 if self._policy.chooses else LIMITS_S)
        left_s = self.budget.left_s - self._rounds_s(runners)
        has = steps_s <= max(left_s, SHORT_CHECK_S if self.budget.is_a_look else 0.0)
        if not has:
            self.note_limits(runners)
        return has

    def note_limits(self, runners: Sequence[Runner]) -> None:
        """That they are missing, at least in part."""
        note = "memory and limits were left out, since the budget is short"
        runners[0].record.notes["limits"] = note

    def to_check(self, runners: Sequence[Runner]) -> list[Runner]:
        """With the baseline in front: what is checked before the rounds, where all is right."""
        names = set(self._policy.to_check([runner.record.name for runner in runners[1:]]))
        return [runner for runner in runners if runner is runners[0] or runner.record.name in names]

    def _needed_s(self, runners: Sequence[Runner]) -> float:
        """For the check, and for rounds enough."""
        return self._check_s(runners) + self._rounds_s(runners)

    def _check_s(self, runners: Sequence[Runner]) -> float:
        first, *rest = runners = self.to_check(runners)
        rounded = {runner.precision for runner in rest} - {first.precision}
        of_baseline = REFERENCE + ROUNDED * len(rounded) if rest else 0
        of_each = CALLS * sum(runner.worst_s for runner in runners)
        return of_baseline * first.worst_s + of_each

    def _rounds_s(self, runners: Sequence[Runner]) -> float:
        """For the rounds that are still missing."""
        taken = min((len(runner.record.times_s) for runner in runners), default=0)
        missing = max(self._policy.least_rounds(len(runners) - 1) - taken, 0)
        return missing * sum(runner.worst_s for runner in runners)


def _variants(number: int) -> str:
    return "1 variant" if number == 1 else f"{number} variants"
