"""The benchmark: variants of one step, interleaved in shuffled rounds, then everything put back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from speedkit_jupyter.context import hidden, prepare
from speedkit_jupyter.exceptions import StepError
from speedkit_jupyter.facts import has_lazy_parameters
from speedkit_jupyter.measure import dropping, memory, warming
from speedkit_jupyter.measure.comparison import Comparison, Record
from speedkit_jupyter.measure.dropping import Drop
from speedkit_jupyter.measure.environment import environment
from speedkit_jupyter.measure.examination import Examination
from speedkit_jupyter.measure.isolation import State
from speedkit_jupyter.measure.runner import Runner
from speedkit_jupyter.measure.sampler import Progress, Sampler
from speedkit_jupyter.measure.standing import Standing, standings
from speedkit_jupyter.measure.statistics import ERROR
from speedkit_jupyter.measure.step import Step
from speedkit_jupyter.measure.variants import Variant, config_of

# A search goes on once its intervals are as narrow as this share of the median, and ends once that
# of its proof is.
ENOUGH_TO_CHOOSE, ENOUGH_TO_CONFIRM = 0.08, 0.05


class Benchmark:
    """Measures a step under several variants. Drain `run()`, then read `result()`.

    `budget_s` are the seconds for the rounds, after warm-up. The device is synchronized around
    each step, or with `throughput` only around blocks of steps. `check` names what the step
    leaves in its namespace for the accuracy check, in place of what backward ran on;
    `drop` takes variants out of the rounds: `far` those that are far slower in each of the first
    ones, `slower` also those that are known to gain nothing worth it, `beaten` also those that
    another one is known to beat; with the last two, which choose and prove nothing, less
    precision is enough, and limits are not measured. The rounds end when the verdicts of
    the `decisive` variants (all, without) are clear. They compare with the variant `against`,
    where it works, in place of the first one, which only accuracy is judged by then. Whatever
    happens,
    models, optimizers, random generators and names end as they began. Raises StepError.
    """

    def __init__(
        self,
        step: Step,
        variants: Sequence[Variant],
        budget_s: float = 10.0,
        *,
        throughput: bool = False,
        check: Sequence[str] = (),
        command: str = "",
        drop: Drop = "",
        decisive: Sequence[str] = (),
        against: str = "",
    ) -> None:
        if not step.models:
            raise StepError("no model is used in this step, so there is nothing to vary")
        if any(map(has_lazy_parameters, (*step.models, *step.bystanders))):
            raise StepError("lazy layers have no shape yet: run one forward pass before")
        if not budget_s > 0 or math.isinf(budget_s):
            raise StepError(f"the budget must be a positive number of seconds, not {budget_s:g}")
        self.step, self.variants, self.budget_s = step, tuple(variants), float(budget_s)
        self.command = command
        self._throughput, self._check = throughput, tuple(check)
        self._drop, self._decisive, self._against = drop, tuple(decisive), against
        self._chooses = drop in ("slower", "beaten")
        self._records = [Record(one.name) for one in self.variants]
        self._sampler: Sampler | None = None
        self._flops: int | None = None
        self._dropout_off = False
        self._environment: dict[str, Any] = {}
        self._clock: Callable[[], float] = time.perf_counter
        self._standings: tuple[Standing, ...] = ()

    def result(self) -> Comparison:
        """What is known so far."""
        sampler = self._sampler
        return Comparison(
            tuple(self._records),
            self._environment,
            self.budget_s,
            error=ERROR if sampler is None else sampler.error,
            round_s=None if sampler is None else sampler.round_s,
            flops=self._flops,
            command=self.command,
            dropout_off=self._dropout_off,
            skipped_rounds=0 if sampler is None else sampler.skipped_rounds,
        )

    def has_results(self) -> bool:
        """Whether there is anything to show already."""
        return any(one.times_s for one in self._records)

    def run(self) -> Generator[Progress, None, None]:
        """Measure; yields after every block. Closing the generator ends it and puts all back."""
        __tracebackhide__ = True
        step = self.step
        configs = [config_of(one, step.models) for one in self.variants]
        with ExitStack() as stack:
            # Hidden first: settings of a plan in force are no part of what to come back to.
            for model in step.models:
                stack.enter_context(hidden(model))
            _keep_copies_where_they_fit(step, len(self.variants) + 1)
            visit = stack.enter_context(step.isolated())
            start = visit.state
            # Seconds of its own: those of turns that it gave up don't count. (No method of this
            # object: the sampler, which it holds, would hold it too, and both the user's model.)
            self._clock = lambda: time.perf_counter() - visit.paused_s
            runners = [self._runner(i, config) for i, config in enumerate(configs)]
            self._environment = environment(runners[0].device)
            yield from self._warm_up(_working(runners), start)
            check = yield from self._examine(_working(runners), start)
            yield from self._sample(self._compared(_working(runners)))
            if not self._chooses:
                yield from check.again(_working(runners))
                step.kept.clear()  # as large as the model: only the stages of a search share it

    def _runner(self, index: int, config: Any) -> Runner:
        record = self._records[index]
        contexts = [prepare(m, config, self.step.holders(m)) for m in self.step.models]
        plan = contexts[0].plan
        record.plan = plan.active_values()
        record.applied = {d.name: d.value for d in plan if d.active}
        record.notes = {d.name: f"declined: {d.reason}" for d in plan if d.declined}
        if config is not None and not record.applied and index > 0:
            _nothing_to_measure(record)
        return Runner(self.step, contexts, record)

    def _warm_up(self, runners: Sequence[Runner], start: State) -> Iterator[Progress]:
        __tracebackhide__ = True
        ahead = ""
        for number, runner in enumerate(runners):
            name = runner.record.name
            yield Progress(0.0, f"{ahead}warming up {name} ({number + 1} of {len(runners)})")
            try:
                with runner.applied():
                    # No longer than its share of the budget.
                    warming.warm_up(runner, self.budget_s / len(self._records))
                    runner.warm = runner.state()
            except Exception as error:
                if number == 0:  # the step itself is wrong: the user's error, as it is
                    raise
                runner.fail(error)  # a row; the others go on
            # Back to the user's values, so that every variant warms up from the same ones.
            start.restore()
            ahead = ahead or self._estimate(runners)

    def _estimate(self, runners: Sequence[Runner]) -> str:
        """How long it will take, said as soon as one step has been seen."""
        step_s = runners[0].step_s
        compiled = sum(bool(one.record.applied.get("compile")) for one in runners)
        seconds = self.budget_s + 8 * step_s * len(runners) + 2
        besides = f" and the compiling of {compiled}" if compiled else ""
        return f"about {seconds:.0f} s{besides}; "

    def _examine(
        self, runners: Sequence[Runner], start: State
    ) -> Generator[Progress, None, Examination]:
        """Accuracy, memory and limits, each from untimed steps."""
        __tracebackhide__ = True
        check = Examination(runners, start, self._check)
        yield from check.accuracy()
        self._dropout_off = check.dropout_off
        working = Examination(_working(runners), start)
        yield from working.memory()
        self._flops = working.flops()
        if not self._chooses:
            yield from working.limits(self._flops)
        return check

    def _compared(self, runners: Sequence[Runner]) -> Sequence[Runner]:
        """With the one to compare with in front, in place of the first; results follow."""
        result = self.result()
        works = [one for one in runners if result.verdict(one.record) != "wrong"]
        rival = next((one for one in works if one.record.name == self._against), None)
        if rival is None:
            return runners
        others = [one for one in self._records[1:] if one is not rival.record]
        self._records = [rival.record, *others]
        return [rival, *(one for one in runners[1:] if one is not rival)]

    def _sample(self, runners: Sequence[Runner]) -> Iterator[Progress]:
        __tracebackhide__ = True
        if self._chooses:
            runners = [one for one in runners if not dropping.is_too_slow(one, runners[0])]
        # In a search, whose stages build on each other.
        patient = self._chooses or bool(self._decisive)
        self._sampler = Sampler(runners, self.budget_s, self._throughput, patient, self._clock)
        if warning := self._sampler.too_few():
            yield Progress(0.0, warning)
        for one in self._sampler.run(self._settled, self._known, self._is_hopeless):
            yield replace(one, known=self._standings)

    def _settled(self) -> bool:
        """Every verdict is clear, and precise; to choose by, not to print, less is enough."""
        assert self._sampler is not None
        result = self.result()
        records = [one.record for one in self._sampler.runners]
        ratios = [
            result.ratio(one) for one in records if not self._decisive or one.name in self._decisive
        ]
        if not (self._chooses or self._decisive):
            return all(r.settled for r in ratios if r)
        enough = ENOUGH_TO_CHOOSE if self._chooses else ENOUGH_TO_CONFIRM
        if self._chooses and len(records) <= 2:  # nobody to choose between
            enough = math.inf
        return all(r.verdict != "too noisy" and r.is_precise(enough) for r in ratios if r)

    def _is_hopeless(self, record: Record, is_look: bool) -> bool:
        if not self._drop:
            return False
        if not (is_look and self._chooses):
            return dropping.is_far_behind(self._records[0].times_s, record.times_s)
        return dropping.cannot_win(self.result(), record, self._drop)

    def _known(self) -> str:
        """Notes the intervals at a look, which progress shows row by row and not in its text."""
        self._standings = standings(self.result())
        return ""


def _working(runners: Sequence[Runner]) -> list[Runner]:
    return [one for one in runners if not one.record.failure and not one.record.same_as_baseline]


def _nothing_to_measure(record: Record) -> None:
    """A plan that changes nothing is the baseline; a wish that was declined is no variant."""
    if record.notes:
        record.failure = "; ".join(f"{name} {note}" for name, note in record.notes.items())
        record.notes = {}
    else:
        record.same_as_baseline = True


def _keep_copies_where_they_fit(step: Step, copies: int) -> None:
    """Optimizer state that does not exist yet counts as the two tensors that Adam keeps."""
    model = step.models[0]
    device = next(model.parameters()).device if any(True for _ in model.parameters()) else None
    state = memory.size(memory.state_tensors(step.models, step.optimizers))
    parameters = memory.size([p for one in step.models for p in one.parameters()])
    size = max(state, 4 * parameters if step.optimizers else 0)
    step.off_device = device is not None and not memory.fits(copies * size, device)
