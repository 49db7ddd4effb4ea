"""The warm-up of all variants, one after another, each from the user's own values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from speedkit_jupyter.measure.rounds import clock, warm_up
from speedkit_jupyter.measure.rounds.pace import Pace
from speedkit_jupyter.measure.rounds.policy import Policy
from speedkit_jupyter.measure.rounds.runner import Runner
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.subject import repeats
from speedkit_jupyter.measure.subject.made_inside import made_inside
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.undo.isolation import State
from speedkit_jupyter.support.exceptions import StepError

# All of it takes at most this part of the budget.
WARM_UP_SHARE = 10


class WarmUps:
    """Of so many variants of a step, at this pace; the policy says which are left out."""

    def __init__(self, step: Step, pace: Pace, policy: Policy, number: int) -> None:
        self._step, self._pace, self._policy, self._number = step, pace, policy, number

    def first(self, runner: Runner, start: State) -> Iterator[Progress]:
        """The one that the others are compared with; what it raises is the user's error, as it is.

        With it is seen which optimizers the step makes, and whether it does its work again.
        """
        __tracebackhide__ = True
        step = self._step
        yield Progress(0.0, f"warming up {runner.record.name} (1 of {self._number})")
        try:
            with runner.applied():
                with made_inside(step.models) as made:
                    warm_up.warm_up(runner, self._most_warm_s(), self._pace.budget)
                step.made = step.made or made
        except StepError:
            raise
        except Exception as error:  # a schedule has so many steps
            if runner.warm is None or step.repeats is not None:
                raise
            step.repeats = repeats.ended(error)
            runner.fail(error)
            runner.record.failure = None
        first_s = runner.record.first_call_s or 0.0
        looks = step.repeats is None and self._pace.budget.allows(2 * runner.fastest_s)
        if looks and repeats.is_suspicious(first_s, runner.fastest_s):
            step.repeats = repeats.of_runner(runner, start)
        if step.afresh:
            runner.restarted(start)
        # Back to the user's values, so that every variant warms up from the same ones.
        start.restore()

    def others(self, runners: Sequence[Runner], start: State) -> Iterator[Progress]:
        """The others, one after another."""
        __tracebackhide__ = True
        first, budget, pace = runners[0], self._pace.budget, self._pace
        usual_s = first.worst_s
        pace.grow(usual_s, len(runners))
        ahead = pace.ahead(runners)
        for number, runner in enumerate(runners[1:], 2):
            name = runner.record.name
            if not budget.allows(2 * usual_s):
                pace.leave_out(runner)
                continue
            if why := self._policy.why_left_out(name):
                runner.record.notes["dropped"], runner.warm = why, None
                continue
            yield Progress(0.0, f"{ahead}warming up {name} ({number} of {len(runners)})")
            begun_s, excluded_s = clock.now(), budget.excluded_s
            try:
                with runner.applied():
                    if runner.record.is_compiled:  # the first to do so loads Inductor
                        budget.exclude(clock.now() - begun_s)
                    if self._step.afresh:
                        runner.warm = runner.state()
                    most_s, hasty = self._most_warm_s(), self._policy.hasty
                    warm_up.warm_up(runner, most_s, budget, usual_s, hasty)
            except Exception as error:
                runner.fail(error)  # a row; the others go on
                if runner.record.is_compiled:  # what it took was no step
                    budget.exclude(clock.now() - begun_s - (budget.excluded_s - excluded_s))
            start.restore()
            if runner.warm is not None and not self._policy.keeps(runner, first):
                runner.warm = None  # not even checked, which takes one more step

    def _most_warm_s(self) -> float:
        """No longer than its share of the budget."""
        return self._pace.budget.seconds / (WARM_UP_SHARE * self._number)
