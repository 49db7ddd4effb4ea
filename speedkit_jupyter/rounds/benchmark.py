"""The benchmark: variants of one step, interleaved in shuffled rounds, then everything put back."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from speedkit_jupyter.catalog.facts.model import has_lazy_parameters
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.plans.planning import together
from speedkit_jupyter.right.judge import Accuracy
from speedkit_jupyter.rounds import budget, clock
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.examination import Examination, Surrounding
from speedkit_jupyter.rounds.named_accuracy import NamedAccuracy
from speedkit_jupyter.rounds.record import Record, environment
from speedkit_jupyter.rounds.runner import Pool, Runner, compared_runs, pooled, release
from speedkit_jupyter.rounds.sampler import Policy, Progress, Sampler
from speedkit_jupyter.rounds.statistics import ERROR
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.step import watching
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import Variant, config_of
from speedkit_jupyter.support import units
from speedkit_jupyter.support.arguments import seconds
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue import heap

# A variant that is this many times slower in its warm-up is left out first where time is short.
HOPELESS = 2.0


class Benchmark:
    """Measure a step under several variants. Drain `run()`, then read `result()`.

    `budget_s` are the seconds for everything but compiling, from now on; None is enough for a clear
    answer. The benchmarks of a search share a `pool`, and are parts of the budget that they are
    `within`. The time of an `accuracy` comes on top. Raises StepError.
    """

    def __init__(
        self,
        step: Step,
        variants: Sequence[Variant],
        budget_s: float | None = None,
        *,
        command: str = "",
        policy: Policy | None = None,
        within: Budget | None = None,
        pool: Pool | None = None,
        accuracy: NamedAccuracy | None = None,
    ) -> None:
        if not step.models:
            raise StepError(step.why_no_model("vary"))
        if any(map(has_lazy_parameters, (*step.models, *step.bystanders))):
            raise StepError("lazy layers have no shape yet: run one forward pass before")
        self._grows = budget_s is None
        self._accuracy = accuracy
        if accuracy is not None:  # what the function changes is put back, too
            step = replace(step, others=[*step.others, accuracy.function])
        self.step = step
        self.variants = tuple(variants)
        self.budget_s = seconds("budget_s", budget_s) or budget.DEFAULT_BUDGET_S
        self.command, self.begun_s = command, clock.now()
        self._policy, self._within, self._pool = policy or Policy(), within, pool
        self._records = [Record(variant.name) for variant in self.variants]
        self._first: Runner | None = None  # the baseline, once it is warm
        self._sampler: Sampler | None = None
        self._dropout_off = False
        self._environment: dict[str, Any] = {}
        self.budget = Budget(self.budget_s, within=within)
        self._interruptions = clock.Interruptions()

    def result(self) -> Comparison:
        sampler = self._sampler
        return Comparison(
            tuple(self._records),
            self._environment,
            self.budget.seconds,
            error=ERROR if sampler is None else sampler.rounds.error,
            round_s=None if sampler is None else sampler.rounds.round_s,
            command=self.command,
            accuracy_name="" if self._accuracy is None else self._accuracy.name,
            dropout_off=self._dropout_off,
            unrestorable=tuple(self.step.said),
            repeats="" if self._first is None else self._first.facts.repeats.line,
            skipped_rounds=0 if sampler is None else sampler.skipped_rounds,
            compiled_rounds=0 if sampler is None else sampler.compiled_rounds,
        )

    def has_results(self) -> bool:
        return any(record.times_s for record in self._records)

    def run(self) -> Generator[Progress, None, None]:
        """Measure; yield after every block. Closing the generator ends it and puts all back."""
        with ExitStack() as stack:
            pool = self._pool or stack.enter_context(pooled(self.step, len(self.variants) + 1))

            def now() -> float:  # turns that it gave up don't count
                return clock.now() - pool.guard.paused_s

            # To put the state back takes as long as to copy it.
            is_whole = self._pool is None
            ends = (self.begun_s, pool.guard.taking_s) if is_whole else ()
            self.budget = Budget(self.budget_s, now, self._within, *ends)
            runners = yield from self.warm_up(pool)
            runners = self._as_many_as_fit(_warm(runners))
            yield from self._sample(runners)
            if runners := _warm(runners):  # the baseline itself may have failed in the rounds
                yield from self._measure_memory(runners)
                # Checks start from the user's state and need memory. The runners' states are freed,
                # except in the races of a search, which goes on with them.
                if self._pool is None or self._policy.proves:
                    for runner in runners:
                        runner.drop_state()
                yield from self._check(runners, pool)
            yield from self._ask_accuracy(_working(runners)[1:], pool.guard.state)

    def warm_up(
        self, pool: Pool, around: Surrounding = nullcontext
    ) -> Generator[Progress, None, list[Runner]]:
        """Warm up the variants that are new to the pool; return a runner for each variant."""
        start = pool.guard.state
        first = self._runner(0, pool, pool.facts)
        self._environment = environment(first.device)
        if first.warm is None:
            first = yield from self._warm_up_baseline(first, start, around)
        self._first = first
        yield from self._ask_accuracy([first], start)
        # Planned once it is known which optimizers the step makes itself.
        runners = [first]
        runners += [self._runner(n, pool, first.facts) for n in range(1, len(self.variants))]
        yield Progress(0.0, self._time_ahead(_working(runners)))
        yield from self._warm_up_others(_working(runners), start)
        pool.add(runners)
        return runners

    def _warm_up_baseline(
        self, runner: Runner, start: Snapshot, around: Surrounding
    ) -> Generator[Progress, None, Runner]:
        yield Progress(0.0, f"warming up {runner.record.name} (1 of {len(self.variants)})")
        given = self.budget, self._interruptions, len(self.variants)
        does = runner.facts.repeats
        try:
            with runner.applied(), watching.optimizers_made(self.step.models) as made:
                runner.warm_up(*given, around=around)
        except StepError:
            raise
        except Exception as error:  # the calls of a schedule are numbered
            if runner.warm is None or does is not watching.UNCOMPARED:
                raise
            does = watching.ended(error)
            release(error)
        first_s = runner.record.first_call_s or 0.0
        looks = does is watching.UNCOMPARED and self.budget.allows(2 * runner.fastest_s)
        if looks and watching.is_suspicious(first_s, runner.fastest_s):
            does = compared_runs(runner.step, start, runner.once, runner.applied, runner.warm)
        facts = replace(runner.facts, made=runner.facts.made or tuple(made), repeats=does)
        runner = replace(runner, facts=facts)
        if facts.repeats.afresh:
            start.restore()  # before the plan is applied: settings are part of the state
            with runner.applied():
                runner.warm_up(*given)
        draws = start.draws()
        start.restore()  # every variant warms up from the user's values
        return replace(runner, facts=replace(facts, leaves=draws or start.has_changed))

    def _warm_up_others(self, runners: Sequence[Runner], start: Snapshot) -> Iterator[Progress]:
        """Warm up one after another; one that fails is a row, one without time is named."""
        first, number = runners[0], 1
        for runner in [one for one in runners[1:] if one.warm is None]:
            number += 1
            if not self.budget.allows(2 * first.worst_s):
                self._leave_out(runner, first)
                continue
            name = runner.record.name
            doing = "compiling" if runner.record.is_compiled else "warming up"
            yield Progress(0.0, f"{doing} {name} ({number} of {len(self.variants)})")
            begun_s, excluded_s = clock.now(), self.budget.excluded_s
            try:
                with runner.applied():
                    heap.occupy_free_addresses()
                    if runner.record.is_compiled:  # the first to do so loads Inductor
                        self.budget.exclude(clock.now() - begun_s)
                    variants = len(self.variants)
                    runner.warm_up(self.budget, self._interruptions, variants, first.worst_s)
            except Exception as error:
                runner.fail(error)
                if runner.record.is_compiled:  # it made no step
                    self.budget.exclude(clock.now() - begun_s - self.budget.excluded_s + excluded_s)
            start.restore()
            is_slow = runner.times_slower(first) > self._policy.far_slower
            if is_slow and runner.fastest_s > first.worst_s and not runner.was_disturbed:
                runner.record.notes["dropped"] = _far_slower(runner, first)
                runner.drop_state()

    def _leave_out(self, runner: Runner, first: Runner) -> None:
        """Measure it no further, and say why: with its figure if it is twice as slow."""
        # The user does not know the parts of a search's budget.
        given = f"{units.seconds(self.budget.seconds)} are"
        short = f"{'the rest of the budget is' if self._within else given} too short"
        told = f"{short} for this many variants of it"
        if runner.was_disturbed:
            told = f"the machine was busy; {short} to time it"
        elif runner.times_slower(first) > 2.0:
            told = f"{_far_slower(runner, first)}; {short} to time it"
        runner.record.notes["left out"] = told
        runner.drop_state()

    def _runner(self, index: int, pool: Pool, facts: watching.StepFacts) -> Runner:
        step, variant = self.step, self.variants[index]
        if (known := pool.runners.get(variant.name)) is not None:
            record = self._records[index] = known.record.anew()
            return replace(known, record=record)
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
        record = self._records[index] = Record(
            variant.name,
            plan=plan.active_values(),
            applied=applied,
            changes_model={k: v for one in contexts for k, v in one.plan.changes_model().items()},
            declines=declines,
            declined=is_empty and bool(declines),
            same_as_baseline=is_empty and not declines,
            failure="; ".join(reasons) or None,
        )
        return Runner(step, contexts, record, facts, around=variant.around or nullcontext)

    def _time_ahead(self, runners: Sequence[Runner]) -> str:
        """Return how long it will take; a budget that is not the user's grows to be clear."""
        first = runners[0]
        rounds = len(runners) * (budget.APART + 12)  # about
        needed_s = first.worst_s * (budget.CHECK_STEPS + rounds)
        if self._grows:
            self.budget.grow(min(needed_s, 600.0))  # no one waits longer unasked
        about_s = max(self.budget.seconds, budget.OVERHEAD_S)
        text = f"one step takes {first.step_s:.2g} s: about {about_s:.0f} s"
        compiled = sum(runner.record.is_compiled for runner in runners)
        text += f" and the compiling of {compiled}" if compiled else ""
        is_short = needed_s > self.budget.seconds and not self._within
        return f"{text}, short for a clear answer; {budget.LONGER}" if is_short else text

    def _as_many_as_fit(self, runners: Sequence[Runner]) -> list[Runner]:
        """Leave out variants without time: the hopeless ones, then the last; two may stay."""
        kept = list(runners)
        while len(kept) > 1 and not self.budget.is_minimal:
            if self._rounds_s(kept) + self._checks_s(kept) <= self.budget.left_s:
                break
            if len(kept) == 2 and self.budget.allows(sum(runner.worst_s for runner in kept)):
                break
            slowest = max(kept[1:], key=lambda runner: runner.fastest_s)
            gone = slowest if slowest.times_slower(kept[0]) > HOPELESS else kept[-1]
            self._leave_out(gone, kept[0])
            kept = [runner for runner in kept if runner is not gone]
        return kept

    def _rounds_s(self, runners: Sequence[Runner]) -> float:
        rounds = self._policy.least_rounds(len(runners) - 1)
        return budget.LATEST * rounds * sum(runner.usual_s for runner in runners)

    def _checks_s(self, runners: Sequence[Runner]) -> float:
        first, others, most = runners[0], runners[1:], self._policy.checked
        number = len(others) if most is None else min(len(others), most)
        lowered = {runner.precision for runner in others} - {first.precision}
        steps = budget.REFERENCE + budget.CHECKED * (len(lowered) + number)
        return steps * first.usual_s + budget.CHECK_S * number if number else 0.0

    def _sample(self, runners: Sequence[Runner]) -> Iterator[Progress]:
        """Take the rounds; the rest of the budget is reserved for the checks."""
        reserve_s = 0.0
        if runners:
            spare_s = self.budget.left_s - self._rounds_s(runners)
            one_s = min(self._checks_s(runners[:2]), self.budget.left_s / 2)
            reserve_s = max(min(self._checks_s(runners), spare_s), one_s, 0.0)
        with self.budget.reserving(reserve_s):
            left_s = self.budget.left_s
            if self.budget.is_minimal:
                left_s = max(left_s, min(self.budget.seconds, budget.OVERHEAD_S / 2))
            left_s = min(left_s, self._policy.rounds_s)
            self._sampler = Sampler(runners, left_s, self.budget)
            yield from self._sampler.run(self._policy, self.result)

    def _ask_accuracy(self, runners: Sequence[Runner], start: Snapshot) -> Iterator[Progress]:
        """Note the user's own number under each variant; the time for that is excluded."""
        if (named := self._accuracy) is None:
            return
        for runner in runners:
            record = runner.record
            yield Progress(0.0, f"{named.name} of {record.name}")
            begun_s = clock.now()
            start.restore()  # before the plan is applied: settings are part of the state
            try:
                with runner.applied():
                    record.score = named.number(self.step)
            except StepError as error:
                if runner is self._first:
                    raise
                record.notes[named.name] = str(error)
            finally:
                start.restore()
                self.budget.exclude(clock.now() - begun_s)

    def _measure_memory(self, runners: Sequence[Runner]) -> Iterator[Progress]:
        """Measure memory, from untimed steps, where there is time before the checks."""
        if not self._policy.has_limits:
            return
        # torch's profiler, which watches the allocator, takes 0.3 s to begin.
        needed_s = 0.3 + 3 * sum(runner.worst_s for runner in runners)
        if self.budget.allows(needed_s + self._checks_s(runners)) or self.budget.is_minimal:
            with self.budget.compiling_excluded(needed_s):
                for runner in runners:
                    if runner.record.memory is None:
                        yield Progress(0.0, f"memory of {runner.record.name}")
                        runner.measure_memory()

    def _check(self, runners: Sequence[Runner], pool: Pool) -> Iterator[Progress]:
        """Check the variants that the policy names: always the first one that is proven faster,
        others if there is time.
        """
        first, by_name = runners[0], {runner.record.name: runner for runner in runners[1:]}
        examination, is_first = Examination(first, pool), True
        needed_s = (budget.REFERENCE + budget.CHECKED) * first.usual_s
        verdict = self.result().verdict
        for record in self._policy.to_check(self.result()):
            runner = by_name.get(record.name)
            if runner is None or record.failure:
                continue
            needed_s += budget.CHECKED * first.usual_s
            is_sure = is_first and (self._policy.proves or verdict(record) == "faster")
            if is_sure or self.budget.allows(needed_s):
                if record.accuracy is None:  # no earlier benchmark has checked it
                    yield Progress(1.0, f"checking {record.name}")
                    with self.budget.compiling_excluded(needed_s), heap.kept():
                        record.accuracy = examination.check(runner)
                        first.record.accuracy = examination.baseline_accuracy
                is_first, needed_s = False, 0.0
            elif verdict(record) == "faster":
                record.accuracy = Accuracy("not checked", "the budget was too short to check")
        self._dropout_off = examination.dropout_off


def _far_slower(runner: Runner, first: Runner) -> str:
    times = runner.times_slower(first)
    return f"far slower than {first.record.name}: {times:.1f} times in its fastest step"


def _working(runners: Sequence[Runner]) -> list[Runner]:
    return [one for one in runners if not (one.record.failure or one.record.same_as_baseline)]


def _warm(runners: Sequence[Runner]) -> list[Runner]:
    return [runner for runner in _working(runners) if runner.warm is not None]
