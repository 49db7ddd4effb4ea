"""The benchmark: variants of one step, interleaved in shuffled rounds, then everything put back."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

from speedkit_jupyter.measure.checks.accuracy import Accuracy
from speedkit_jupyter.measure.checks.examination import Examination
from speedkit_jupyter.measure.checks.scorer import Scorer
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.results.statistics import ERROR
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.budget import OVERHEAD_S, Budget
from speedkit_jupyter.measure.rounds.pace import Pace
from speedkit_jupyter.measure.rounds.policy import Policy
from speedkit_jupyter.measure.rounds.preparing import keep_copies_where_they_fit, prepared
from speedkit_jupyter.measure.rounds.runner import Runner
from speedkit_jupyter.measure.rounds.sampler import Progress, Sampler
from speedkit_jupyter.measure.rounds.warm_up_of_all import WarmUps
from speedkit_jupyter.measure.subject.environment import environment
from speedkit_jupyter.measure.subject.named_accuracy import NamedAccuracy
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.subject.variants import Variant
from speedkit_jupyter.measure.undo.isolation import State
from speedkit_jupyter.measure.undo.walk import Walk
from speedkit_jupyter.optimizations.facts.layers import has_lazy_parameters
from speedkit_jupyter.plans.applying import hidden
from speedkit_jupyter.support.arguments import seconds
from speedkit_jupyter.support.exceptions import StepError

# Without a budget of the user's it takes so long, or more where a step is long.
DEFAULT_S = 10.0


class Benchmark:
    """Measures a step under several variants. Drain `run()`, then read `result()`.

    `budget_s` are the seconds for all of it, without what compiling takes: where they are short,
    fewer variants are measured, and less is examined. None is enough for a clear answer. The
    device is synchronized around each step, or with `throughput` only around blocks of steps.
    `check` names what the step leaves in its namespace for the accuracy check, in place of what
    backward ran on. The `accuracy` that the user names is asked under each variant, and decides
    about what makes another model; what that takes comes on top. The `policy` says which variants
    leave the rounds, when these end, and what is checked. It ends `within` another budget, too; its
    own begins when it runs, or began at `begun_s` on the clock, where that is set. Whatever
    happens, models, optimizers, random generators and names end as they began. Raises StepError.
    """

    def __init__(
        self,
        step: Step,
        variants: Sequence[Variant],
        budget_s: float | None = None,
        *,
        throughput: bool = False,
        check: Sequence[str] = (),
        command: str = "",
        policy: Policy | None = None,
        within: Budget | None = None,
        accuracy: NamedAccuracy | None = None,
    ) -> None:
        if not step.models:
            raise StepError(step.why_no_model("vary"))
        if any(map(has_lazy_parameters, (*step.models, *step.bystanders))):
            raise StepError("lazy layers have no shape yet: run one forward pass before")
        self._grows = budget_s is None
        self._scorer = None if accuracy is None else Scorer(accuracy, step)
        self.step = step if accuracy is None else step.with_others(accuracy.function)
        self.variants, self.budget_s = tuple(variants), seconds("budget_s", budget_s) or DEFAULT_S
        self.command = command
        self._throughput, self._check = throughput, tuple(check)
        self._policy = policy or Policy()
        self._records = [Record(variant.name) for variant in self.variants]
        self._sampler: Sampler | None = None
        self._flops: int | None = None
        self._dropout_off = False
        self._environment: dict[str, Any] = {}
        self._within = within
        self.begun_s: float | None = None
        self._pace = self._new_pace()

    def _new_pace(self, now: Callable[[], float] | None = None) -> Pace:
        return Pace(self.budget_s, now, self._policy, self._grows, self._within, self.begun_s)

    @property
    def budget(self) -> Budget:
        """What it goes by; a default one grows with the step."""
        return self._pace.budget

    @property
    def judging_s(self) -> float:
        """What the accuracy that the user names took; the budget does not count it."""
        return 0.0 if self._scorer is None else self._scorer.took_s

    def result(self) -> Comparison:
        """What is known so far."""
        sampler = self._sampler
        return Comparison(
            tuple(self._records),
            self._environment,
            self.budget.seconds,
            error=ERROR if sampler is None else sampler.error,
            round_s=None if sampler is None else sampler.round_s,
            flops=self._flops,
            command=self.command,
            dropout_off=self._dropout_off,
            beyond=tuple(self.step.said),
            repeats="" if self.step.repeats is None else self.step.repeats.line,
            skipped_rounds=0 if sampler is None else sampler.skipped_rounds,
        )

    def has_results(self) -> bool:
        """Whether there is anything to show already."""
        return any(record.times_s for record in self._records)

    def run(self) -> Generator[Progress, None, None]:
        """Measure; yields after every block. Closing the generator ends it and puts all back."""
        __tracebackhide__ = True
        step = self.step
        pauses: list[Callable[[], float]] = []

        def now() -> float:
            """Seconds of its own: those of turns that it gave up don't count.

            (No method of this object, which would hold itself, and with it the user's model.)
            """
            return clock.now() - sum(pause() for pause in pauses)

        self._pace = self._new_pace(now)
        with ExitStack() as stack:
            # Hidden first: settings of a plan in force are no part of what to come back to.
            for model in step.models:
                stack.enter_context(hidden(model))
            keep_copies_where_they_fit(step, len(self.variants) + 1)
            visit = stack.enter_context(step.isolated())
            start, self.budget.reserved_s = visit.state, visit.taking_s
            pauses.append(lambda: visit.paused_s)
            runners = [self._runner(0, start.walk)]
            self._environment = environment(runners[0].device)
            warm_ups = WarmUps(step, self._pace, self._policy, len(self.variants))
            yield from warm_ups.first(runners[0], start)
            if step.made and runners[0].is_planned:  # without knowing of them
                runners = [self._runner(0, start.walk)]
                yield from warm_ups.first(runners[0], start)
            if self._scorer is not None:
                yield from self._scorer.of_baseline(runners[0], start, self.budget)
            # Planned once it is known which optimizers the step makes itself.
            runners += [self._runner(i, start.walk) for i in range(1, len(self.variants))]
            yield from warm_ups.others(_working(runners), start)
            yield from self._weigh(_warm(runners), start)
            runners = self._pace.within(_warm(runners))
            if self._policy.chooses:
                check = yield from self._examine(runners, start)
                yield from self._sample(_warm(runners), now)
                if check is not None:
                    yield from self._check_late(check, _warm(runners))
            else:  # times first: without any, nothing else says anything
                with self._pace.keeping_checks(runners):
                    yield from self._sample(_warm(runners), now)
                check = yield from self._examine(_by_speed(_warm(runners)), start)
                if check is not None:
                    yield from self._check_late(check, _warm(runners))
            if self._scorer is not None:
                yield from self._scorer.of_others(_warm(runners)[1:], start, self.budget)
            if not self._policy.chooses:
                step.kept.clear()  # as large as the model: only the stages of a search share it

    def _runner(self, index: int, walk: Walk) -> Runner:
        record, variant = self._records[index], self.variants[index]
        return prepared(self.step, variant, record, walk, is_baseline=index == 0)

    def _weigh(self, runners: Sequence[Runner], start: State) -> Iterator[Progress]:
        """Where memory decides it comes first: what saves none needs neither check nor rounds."""
        __tracebackhide__ = True
        if not self._policy.weighs:
            return
        with self._pace.examining(runners, lambda: self._pace.note_limits(runners)):
            yield from Examination(runners, start).memory()
        for runner in runners[1:]:
            if why := self._policy.why_too_heavy(runners[0].record, runner.record):
                runner.record.notes["dropped"], runner.warm = why, None

    def _examine(
        self, runners: Sequence[Runner], start: State
    ) -> Generator[Progress, None, Examination | None]:
        """Accuracy, memory and limits, each from untimed steps; what there is no time for is left.

        Where rounds are too few for any verdict, there is nothing to check either.
        """
        __tracebackhide__ = True
        pace, check = self._pace, None
        if not self._policy.chooses or pace.has_time_to_check(runners):
            check = Examination(runners, start, self._check)
            with (
                pace.keeping_rounds(runners),
                pace.examining(runners, lambda: _not_checked(runners)),
            ):
                yield from check.accuracy(partial(self._policy.is_to_check, records=self._records))
            self._dropout_off = check.dropout_off
        else:
            _not_checked(runners)
        working = _warm(runners)
        is_enough = self._policy.hasty or self._policy.weighs
        if is_enough or not pace.has_time_for_limits(working):
            return check
        about = Examination(working, start)
        with (
            pace.keeping_rounds(working),
            pace.examining(working, lambda: pace.note_limits(working)),
        ):
            yield from about.memory()
            if not self._policy.chooses:
                self._flops = about.flops()
                yield from about.limits(self._flops)
                yield from about.quantities()
        return check

    def _check_late(self, check: Examination, runners: Sequence[Runner]) -> Iterator[Progress]:
        """After the rounds, which may have shown what else has to be right."""
        __tracebackhide__ = True
        by_name = {runner.record.name: runner for runner in runners[1:]}
        with self._pace.examining(runners, lambda: None):
            for record in self._policy.late(self.result()):
                is_new = self._policy.chooses or record.accuracy is None
                if record.name in by_name and is_new:
                    yield from check.late(by_name[record.name])

    def _sample(self, runners: Sequence[Runner], now: Callable[[], float]) -> Iterator[Progress]:
        __tracebackhide__ = True
        if self._policy.chooses:
            result = self.result()
            candidates = [
                runner for runner in runners[1:] if result.verdict(runner.record) != "wrong"
            ]
            runners = [runners[0], *candidates]
        budget = self.budget
        least_s = min(budget.seconds, OVERHEAD_S / 2) if budget.is_a_look else 0.0
        left_s = max(budget.left_s, least_s)

        def sampler(of: Sequence[Runner]) -> Sampler:
            return Sampler(of, left_s, self._throughput, now, budget)

        if not self._policy.hasty and not budget.is_a_look:
            # The examination may have taken longer than planned.
            runners = self._pace.as_many(runners, lambda some: not sampler(some).too_few())
        self._sampler = sampler(runners)
        if not self._policy.hasty and (warning := self._sampler.too_few(budget.seconds)):
            yield Progress(0.0, warning)
        yield from self._sampler.run(self._policy, self.result)


def _not_checked(runners: Sequence[Runner]) -> None:
    """Those that no check has come to."""
    for runner in runners:
        if runner.record.accuracy is None:
            runner.record.accuracy = Accuracy("not checked", "the budget was too short to check")


def _by_speed(runners: Sequence[Runner]) -> list[Runner]:
    """The first, then the fastest: what may win is checked before the time is over."""
    first, *others = runners
    return [first, *sorted(others, key=lambda runner: median(runner.record.times_s or [math.inf]))]


def _working(runners: Sequence[Runner]) -> list[Runner]:
    return [
        runner
        for runner in runners
        if not runner.record.failure and not runner.record.same_as_baseline
    ]


def _warm(runners: Sequence[Runner]) -> list[Runner]:
    """Those that work, and were run already."""
    return [runner for runner in _working(runners) if runner.warm is not None]
