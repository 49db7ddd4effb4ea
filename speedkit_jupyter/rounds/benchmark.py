"""The benchmark: variants of one step, interleaved in shuffled rounds, then everything put back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from speedkit_jupyter.catalog.facts.model import has_lazy_parameters
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.plans.planning import together
from speedkit_jupyter.right.accuracy import Accuracy
from speedkit_jupyter.right.named_accuracy import NamedAccuracy
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.budget import (
    CHECK_S,
    CHECKED,
    DEFAULT_S,
    LATEST,
    LONGER,
    OVERHEAD_S,
    REFERENCE,
    ROUNDED,
    Budget,
    clear_answer_s,
    compiling_excluded,
    few_digits,
)
from speedkit_jupyter.rounds.comparison import WON, Comparison
from speedkit_jupyter.rounds.examination import Examination
from speedkit_jupyter.rounds.pool import Pool, pooled
from speedkit_jupyter.rounds.record import Record, environment
from speedkit_jupyter.rounds.runner import Runner
from speedkit_jupyter.rounds.sampler import Policy, Progress, Sampler, block_steps
from speedkit_jupyter.rounds.scorer import Scorer
from speedkit_jupyter.rounds.statistics import ERROR, least_rounds
from speedkit_jupyter.rounds.warm_up import WarmUp, leave_out
from speedkit_jupyter.step.repeats import StepFacts
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import CURRENT, Variant, config_of
from speedkit_jupyter.support.arguments import seconds
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue import heap

# A budget that is not the user's grows up to this many seconds where a step is long.
MOST_GROWN_S = 600.0
# A variant that is this many times slower is the first that is left out where time is short.
FAR = 2.0


class Benchmark:
    """Measure a step under several variants. Drain `run()`, then read `result()`.

    `budget_s` are the seconds for all of it but compiling: if they are short, fewer variants are
    measured; None is enough for a clear answer. It begins when the benchmark runs, or at `begun_s`
    on the clock, and ends `within` another budget, as one of those that share a `pool`. The device
    is synchronized around each step, or with `throughput` around blocks of steps. `check` names
    what the step leaves for the accuracy check. The user's `accuracy` decides about what changes
    the results; its time comes on top. Raises StepError.
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
        pool: Pool | None = None,
        accuracy: NamedAccuracy | None = None,
        begun_s: float | None = None,
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
        self._throughput, self._check_names = throughput, tuple(check)
        self._policy = policy or Policy()
        self._records = [Record(variant.name) for variant in self.variants]
        self._first: Runner | None = None  # the baseline, once it is warm
        self._sampler: Sampler | None = None
        self._dropout_off = False
        self._environment: dict[str, Any] = {}
        self._within, self._pool = within, pool
        self.begun_s = begun_s
        self.budget = Budget(self.budget_s, within=within)

    def result(self) -> Comparison:
        sampler = self._sampler
        return Comparison(
            tuple(self._records),
            self._environment,
            self.budget.seconds,
            error=ERROR if sampler is None else sampler.error,
            round_s=None if sampler is None else sampler.round_s,
            command=self.command,
            dropout_off=self._dropout_off,
            unrestorable=tuple(self.step.said),
            repeats="" if self._first is None else self._first.facts.line,
            skipped_rounds=0 if sampler is None else sampler.skipped_rounds,
            compiled_rounds=0 if sampler is None else sampler.compiled_rounds,
        )

    def has_results(self) -> bool:
        return any(record.times_s for record in self._records)

    def run(self) -> Generator[Progress, None, None]:
        """Measure; yield after every block. Closing the generator ends it and puts all back."""
        begun_s = clock.now() if self.begun_s is None else self.begun_s
        with ExitStack() as stack:
            pool = self._pool or stack.enter_context(pooled(self.step, len(self.variants) + 1))

            def now() -> float:  # turns that it gave up don't count
                return clock.now() - pool.guard.paused_s

            if self._pool is None:
                taking_s = pool.guard.taking_s  # to put the state back takes as long
                self.budget = Budget(self.budget_s, now, self._within, begun_s, taking_s)
            else:
                self.budget = Budget(self.budget_s, now, self._within)
            runners = yield from self.warm_up(pool)
            if self._policy.weighs:
                yield from self._weigh(_warm(runners), pool)
            runners = self._as_many_as_fit(_warm(runners))
            yield from self._sample(runners)
            if runners := _warm(runners):  # the baseline itself may have failed in the rounds
                yield from self._examine(runners, pool)
                # Checks begin with the user's state, need the room, and decide a search.
                if self._pool is None or self._policy.proves:
                    for runner in runners:
                        runner.drop_state()
                yield from self._check(runners, pool)
            if self._scorer is not None:
                others = _working(runners)[1:]
                yield from self._scorer.scores(others, pool.guard.state, self.budget)

    def warm_up(
        self, pool: Pool, watching: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> Generator[Progress, None, list[Runner]]:
        """Warm up what is not at work in the pool yet, the first call of all while `watching` it;
        return a runner for each variant.
        """
        step, start = self.step, pool.guard.state
        first = self._again_or_new(0, pool, pool.facts)
        self._environment = environment(first.device)
        warm_up = WarmUp(step, self.budget, self._policy, len(self.variants), watching)
        if first.warm is None:
            first = yield from warm_up.baseline(first, start)
        if first.facts.made and first.is_planned:  # it was planned without knowing of them
            first = yield from warm_up.baseline(self._runner(0, first.facts), start)
        self._first = first
        if self._scorer is not None:
            yield from self._scorer.scores([first], start, self.budget)
        # Planned once it is known which optimizers the step makes itself.
        numbers = range(1, len(self.variants))
        others = [self._again_or_new(number, pool, first.facts) for number in numbers]
        yield Progress(0.0, self._time_ahead(first, [first, *_working(others)]))
        cold = [runner for runner in _working(others) if runner.warm is None]
        yield from warm_up.others(first, cold, start)
        pool.add([first, *others])
        return [first, *others]

    def _again_or_new(self, index: int, pool: Pool, facts: StepFacts) -> Runner:
        runner = pool.again(self.variants[index].name)
        if runner is None:
            return self._runner(index, facts)
        self._records[index] = runner.record
        return runner

    def _runner(self, index: int, facts: StepFacts) -> Runner:
        """Return a variant's runner, with a record of its plan."""
        step, variant = self.step, self.variants[index]
        configs = [config_of(variant, model) for model in step.models]
        contexts = [
            prepare(model, config, step.holders(model), facts.made)
            for model, config in zip(step.models, configs, strict=True)
        ]
        plan = together([context.plan for context in contexts])
        applied = {d.name: d.value for d in plan if d.active}
        declines = {d.name: d.reason for d in plan if d.declined}
        is_planned = any(config is not None for config in configs)
        # A plan that changes nothing is the baseline; one that was declined is no variant.
        is_empty = is_planned and not applied and index > 0
        reasons = (f"{name} declined: {reason}" for name, reason in declines.items() if is_empty)
        record = self._records[index] = replace(
            self._records[index],
            plan=plan.active_values(),
            applied=applied,
            changes_model={k: v for one in contexts for k, v in one.plan.changes_model().items()},
            declines=declines,
            declined=is_empty and bool(declines),
            same_as_baseline=is_empty and not declines,
            failure="; ".join(reasons) or None,
        )
        return Runner(
            step,
            contexts,
            record,
            facts,
            around=variant.around or nullcontext,
            is_planned=is_planned,
            is_routed=variant.name != CURRENT,
        )

    def _time_ahead(self, first: Runner, runners: Sequence[Runner]) -> str:
        """Return how long it will take; a budget that is not the user's grows to be clear."""
        needed_s = clear_answer_s(first.worst_s, len(runners))
        if self._grows:
            self.budget.grow(min(needed_s, MOST_GROWN_S))
        budget_s, compiled = self.budget.seconds, sum(r.record.is_compiled for r in runners)
        step = f"one step takes {first.step_s:.2g} s"
        text = f"{step}: about {max(budget_s, OVERHEAD_S):.0f} s"
        text += f" and the compiling of {compiled}" if compiled else ""
        if needed_s > budget_s and not self._within:
            text += f", short for a clear answer ({LONGER})"
            first.record.notes["budget"] = (
                f"{step}: {few_digits(budget_s)} s are short for a clear answer about "
                f"{count(len(runners), 'variant')}; {LONGER}"
            )
        return text

    def _weigh(self, runners: Sequence[Runner], pool: Pool) -> Iterator[Progress]:
        """Measure memory, and drop what is too heavy: that needs neither rounds nor checks."""
        first, *others = runners
        with compiling_excluded(self.budget, sum(runner.worst_s for runner in runners)):
            yield from Examination(runners, pool).memory()
        for runner in others:
            if why := self._policy.why_too_heavy(first.record, runner.record):
                runner.record.notes["dropped"] = why
                runner.drop_state()

    def _as_many_as_fit(self, runners: Sequence[Runner]) -> list[Runner]:
        """Leave out variants without time: the hopeless ones, then the last; two stay."""
        kept = list(runners)
        while len(kept) > 1 and not self.budget.is_minimal:
            if self._rounds_s(kept) + self._checks_s(kept) <= self.budget.left_s:
                break
            slowest = max(kept[1:], key=lambda runner: runner.fastest_s)
            is_hopeless = slowest.times_slower(kept[0]) > FAR
            round_s = sum(runner.worst_s for runner in kept)
            if len(kept) == 2 and not (is_hopeless and not self.budget.allows(round_s)):
                break
            gone = slowest if is_hopeless else kept[-1]
            leave_out(gone, kept[0], self.budget, FAR)
            kept = [runner for runner in kept if runner is not gone]
        return kept

    def _rounds_s(self, runners: Sequence[Runner]) -> float:
        rounds = self._policy.least_rounds(len(runners) - 1)
        return LATEST * rounds * sum(runner.usual_s for runner in runners)

    def _checks_s(self, runners: Sequence[Runner]) -> float:
        first, others, most = runners[0], runners[1:], self._policy.checked
        number = len(others) if most is None else min(len(others), most)
        lowered = {runner.precision for runner in others} - {first.precision}
        steps = REFERENCE + ROUNDED * len(lowered) + CHECKED * number
        return steps * first.usual_s + CHECK_S * number if number else 0.0

    def _sample(self, runners: Sequence[Runner]) -> Iterator[Progress]:
        """Take the rounds; the rest of the budget is reserved for the checks."""
        budget, reserve_s = self.budget, 0.0
        if runners:
            spare_s = budget.left_s - self._rounds_s(runners)
            # A proof is always checked: rounds that could prove nothing would be in vain. Else
            # three rounds show about how fast a variant is.
            few = least_rounds(1) if self._policy.proves else 3
            few_s = few * sum(block_steps(runners)) * sum(runner.usual_s for runner in runners)
            one_s = min(self._checks_s(runners[:2]), budget.left_s - few_s)
            # A check that decides a search may overdraw its budget, so that rounds prove more.
            over_s = 0.15 * budget.seconds if self._policy.proves else 0.0
            reserve_s = max(max(min(self._checks_s(runners), spare_s), one_s) - over_s, 0.0)
        with budget.reserving(reserve_s):
            least_s = min(budget.seconds, OVERHEAD_S / 2) if budget.is_minimal else 0.0
            left_s = min(max(budget.left_s, least_s), self._policy.rounds_s)
            self._sampler = Sampler(runners, left_s, self._throughput, budget)
            yield from self._sampler.run(self._policy, self.result)

    def _check(self, runners: Sequence[Runner], pool: Pool) -> Iterator[Progress]:
        """Check the variants that the policy names: always the first one that is proven faster,
        others if there is time.
        """
        first, by_name = runners[0], {runner.record.name: runner for runner in runners[1:]}
        check, is_first = Examination(runners, pool, self._check_names), True
        needed_s, verdict = (REFERENCE + ROUNDED) * first.usual_s, self.result().verdict
        for record in self._policy.to_check(self.result()):
            runner = by_name.get(record.name)
            if runner is None or record.failure:
                continue
            needed_s += CHECKED * first.usual_s
            is_sure = is_first and (self._policy.proves or verdict(record) in WON)
            if is_sure or self.budget.allows(needed_s):
                with compiling_excluded(self.budget, needed_s), heap.kept():
                    yield from check.late(runner)
                is_first, needed_s = False, 0.0
            elif verdict(record) in WON:
                record.accuracy = Accuracy("not checked", "the budget was too short to check")
        self._dropout_off = check.dropout_off

    def _examine(self, runners: Sequence[Runner], pool: Pool) -> Iterator[Progress]:
        """Measure memory, from untimed steps, where there is time before the checks."""
        if not self._policy.has_limits:
            return
        # torch's profiler, which watches the allocator, takes 0.3 s to begin.
        needed_s = 0.3 + 3 * sum(runner.worst_s for runner in runners)
        names = {runners[0].record.name, *(r.name for r in self._policy.to_check(self.result()))}
        checks_s = self._checks_s([one for one in runners if one.record.name in names])
        if not self.budget.allows(needed_s + checks_s) and not self.budget.is_minimal:
            line = "memory was left out, since the budget is short"
            runners[0].record.notes["limits"] = line
            return
        about = Examination(runners, pool)
        with compiling_excluded(self.budget, needed_s):
            yield from about.memory()


def _working(runners: Sequence[Runner]) -> list[Runner]:
    return [one for one in runners if not (one.record.failure or one.record.same_as_baseline)]


def _warm(runners: Sequence[Runner]) -> list[Runner]:
    """Return those that work, and were run already."""
    return [runner for runner in _working(runners) if runner.warm is not None]
