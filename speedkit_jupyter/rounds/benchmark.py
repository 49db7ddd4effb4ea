"""The benchmark: time variants of one step in shuffled rounds, and put everything back."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from speedkit_jupyter.catalog.facts.model import has_lazy_parameters
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
from speedkit_jupyter.rounds.time_plan import checks_s, time_plan
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.step import watching
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import Variant
from speedkit_jupyter.support import units
from speedkit_jupyter.support.arguments import seconds
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue import heap


class Benchmark:
    """Measure a step under several variants: drain `run()`, then read `result()`.

    `budget_s` are the seconds for everything but compiling, from now on; by default enough for a
    clear answer. Benchmarks of a search share a `pool`, and use a part of the budget `within`. The
    time of an `accuracy` is additional. Raises StepError.
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
        if accuracy is not None:  # changes by the accuracy function are put back, too
            step = replace(step, others=[*step.others, accuracy.function])
        self.step = step
        self.variants = tuple(variants)
        self.budget_s = seconds("budget_s", budget_s) or budget.DEFAULT_BUDGET_S
        self.command, self.begun_s = command, clock.now()
        self._policy, self._within, self._pool = policy or Policy(), within, pool
        self._records = [Record(variant.name) for variant in self.variants]
        self._first: Runner | None = None  # the baseline's runner, once warm
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
        """Measure; yield after every block. Closing the generator puts everything back."""
        policy, is_whole = self._policy, self._pool is None
        with ExitStack() as stack:
            # A copy of the user's state is taken here, and put back when the stack ends.
            pool = self._pool or stack.enter_context(pooled(self.step, len(self.variants) + 1))

            def now() -> float:  # time lent to other tasks doesn't count
                return clock.now() - pool.guard.paused_s

            # Putting the state back takes as long as copying it.
            ends = (self.begun_s, pool.guard.taking_s) if is_whole else ()
            self.budget = Budget(self.budget_s, now, self._within, *ends)
            runners = yield from self.warm_up(pool)
            first, time = runners[0], time_plan(_warm(runners), policy, self.budget)
            for runner in time.left_out:
                self._leave_out(runner, first)
            with self.budget.reserving(time.reserved_s):
                self._sampler = Sampler(time.runners, time.rounds_s, self.budget)
                yield from self._sampler.run(policy, self.result)
            if runners := _warm(time.runners):  # the baseline may have failed in the rounds
                if policy.has_limits:
                    yield from self._measure_memory(runners)
                # Checks start from the user's state and need memory, so runners' states are freed,
                # except in a search, which continues with them.
                for runner in runners if is_whole or policy.proves else ():
                    runner.drop_state()
                yield from self._check(runners, pool)
            yield from self._ask_accuracy(_working(runners)[1:], pool.guard.state)

    def warm_up(
        self, pool: Pool, around: Surrounding = nullcontext
    ) -> Generator[Progress, None, list[Runner]]:
        """Warm up variants that are new to the pool; return the runner of each variant.

        A failure becomes a row, a lack of time a reason.
        """
        start, most = pool.guard.state, len(self.variants)
        first = pool.runner(self.step, self.variants[0])
        self._records[0], self._environment = first.record, environment(first.device)
        if first.warm is None:
            yield Progress(0.0, f"warming up {first.record.name} (1 of {most})")
            first = self._warm_up_baseline(first, start, around)
        self._first = first
        yield from self._ask_accuracy([first], start)
        # Planned later, once the optimizers that the step creates are known.
        others = [pool.runner(self.step, variant, first) for variant in self.variants[1:]]
        runners = [first, *others]
        self._records = [runner.record for runner in runners]
        yield Progress(0.0, self._time_ahead(_working(runners)))
        cold = [runner for runner in _working(others) if runner.warm is None]
        for number, runner in enumerate(cold, 2):
            if not self.budget.allows(2 * first.worst_s):
                self._leave_out(runner, first)
                continue
            doing = "compiling" if runner.record.is_compiled else "warming up"
            yield Progress(0.0, f"{doing} {runner.record.name} ({number} of {most})")
            self._warm_up_other(runner, first)
            start.restore()
        pool.add(runners)
        return runners

    def _warm_up_baseline(self, runner: Runner, start: Snapshot, around: Surrounding) -> Runner:
        """Return the baseline with its warm state and the facts of the step's first calls."""
        given = self.budget, self._interruptions, len(self.variants)
        does = runner.facts.repeats
        try:
            with runner.applied(), watching.optimizers_made(self.step.models) as made:
                runner.warm_up(*given, around=around)
        except StepError:
            raise
        except Exception as error:  # a schedule may limit the calls
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
        start.restore()  # every variant warms up from the user's state
        return replace(runner, facts=replace(facts, leaves=draws or start.has_changed))

    def _warm_up_other(self, runner: Runner, first: Runner) -> None:
        """Warm up a variant; leave it out if it is far slower than the `first` one."""
        begun_s, excluded_s, record = clock.now(), self.budget.excluded_s, runner.record
        try:
            with runner.applied():
                heap.occupy_free_addresses()
                if record.is_compiled:  # the first compiled variant loads Inductor
                    self.budget.exclude(clock.now() - begun_s)
                variants = len(self.variants)
                runner.warm_up(self.budget, self._interruptions, variants, first.worst_s)
        except Exception as error:
            runner.fail(error)
            if record.is_compiled:  # it has made no step
                self.budget.exclude(clock.now() - begun_s - self.budget.excluded_s + excluded_s)
        is_slow = runner.times_slower(first) > self._policy.far_slower
        if is_slow and runner.fastest_s > first.worst_s and not runner.was_disturbed:
            record.notes["dropped"] = _far_slower(runner, first)
            runner.drop_state()

    def _leave_out(self, runner: Runner, first: Runner) -> None:
        """Stop measuring a variant and record the reason, with its speed if it is twice as slow."""
        # Users don't know the parts of a search's budget.
        given = f"{units.seconds(self.budget.seconds)} are"
        short = f"{'the rest of the budget is' if self._within else given} too short"
        told = f"{short} for this many variants of it"
        if runner.was_disturbed:
            told = f"the machine was busy; {short} to time it"
        elif runner.times_slower(first) > 2.0:
            told = f"{_far_slower(runner, first)}; {short} to time it"
        runner.record.notes["left out"] = told
        runner.drop_state()

    def _time_ahead(self, runners: Sequence[Runner]) -> str:
        """Return a text about the expected duration; a default budget grows as needed."""
        rounds = len(runners) * (budget.APART + 12)  # approximately
        needed_s = runners[0].worst_s * (budget.CHECK_STEPS + rounds)
        if self._grows:
            self.budget.grow(min(needed_s, 600.0))  # the longest default
        about_s = max(self.budget.seconds, budget.OVERHEAD_S)
        text = f"one step takes {runners[0].step_s:.2g} s: about {about_s:.0f} s"
        compiled = sum(runner.record.is_compiled for runner in runners)
        text += f" and the compiling of {compiled}" if compiled else ""
        is_short = needed_s > self.budget.seconds and not self._within
        return f"{text}, short for a clear answer; {budget.LONGER}" if is_short else text

    def _ask_accuracy(self, runners: Sequence[Runner], start: Snapshot) -> Iterator[Progress]:
        """Record the user's accuracy under each variant; its time is excluded from the budget."""
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
        """Measure memory in untimed steps, if there is time before the checks."""
        # torch's profiler, which watches the allocator, takes 0.3 s to start.
        needed_s = 0.3 + 3 * sum(runner.worst_s for runner in runners)
        if self.budget.allows(needed_s + checks_s(runners, self._policy)) or self.budget.is_minimal:
            with self.budget.compiling_excluded(needed_s):
                for runner in runners:
                    if runner.record.memory is None:
                        yield Progress(0.0, f"memory of {runner.record.name}")
                        runner.measure_memory()

    def _check(self, runners: Sequence[Runner], pool: Pool) -> Iterator[Progress]:
        """Check the variants that the policy selects.

        The first variant that is proven faster is always checked, others if there is time.
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
                if record.accuracy is None:  # not checked by an earlier benchmark
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
