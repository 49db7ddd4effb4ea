"""Time variants of one step in shuffled rounds, and restore the user's state.

`Benchmark.run` has the phases in order. A `Runner` runs one variant. A `Pool` warms up the runners,
and has the copy of the user's state; all benchmarks of a search share a pool. A `Sampler` times
rounds. An `AccuracyCheck` checks the values that variants compute.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from speedkit_jupyter.rounds import budget, clock
from speedkit_jupyter.rounds.accuracy_check import AccuracyCheck
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.comparison import Comparison, Progress, Record, drained, environment
from speedkit_jupyter.rounds.pool import Pool, pooled, warm, working
from speedkit_jupyter.rounds.runner import Runner
from speedkit_jupyter.rounds.sampler import Policy, Sampler, checks_s, shares_of_time
from speedkit_jupyter.rounds.statistics import ERROR
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.step import memory
from speedkit_jupyter.step.step import Step, arguments_of, step_of
from speedkit_jupyter.step.variants import Variant, variant
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import SpeedKitError, StepError, in_a_line
from speedkit_jupyter.support.extras import provided
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue import interrupts
from speedkit_jupyter.torchglue.interrupts import interruptible_in_users_code


class Benchmark:
    """Measure a step under several variants: drain `run()`, then read `result()`.

    `budget_s` limits the measuring time in seconds (default: 10, or more for long steps); compiling
    and `accuracy` don't count. A search passes its `pool`, and its budget as `within`. A variant
    can't win if the 99th percentile of its step times exceeds `at_most_s`. Raises StepError.
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
        at_most_s: float | None = None,
    ) -> None:
        step.refuse_unfit("vary")
        self._grows = budget_s is None
        self._accuracy, self._at_most_s = accuracy, at_most_s
        if accuracy is not None:  # changes by the accuracy function are undone, too
            step = replace(step, others=[*step.others, accuracy.function])
        self.step = step
        self.variants = tuple(variants)
        self.budget_s = arguments.seconds("budget_s", budget_s) or budget.DEFAULT_BUDGET_S
        self.command, self.begun_s = command, clock.now()
        self._policy, self._within, self._pool = policy or Policy(), within, pool
        self._records = [Record(variant.name) for variant in self.variants]
        self._first: Runner | None = None  # the baseline's runner, once warm
        self._sampler: Sampler | None = None
        self._dropout_off = False
        self._environment: dict[str, Any] = {}
        self.budget = Budget(self.budget_s, within=within)

    def result(self) -> Comparison:
        """Return the results so far."""
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
            at_most_s=self._at_most_s,
            repeats="" if self._first is None else self._first.facts.repeats.line,
            skipped_rounds=0 if sampler is None else sampler.skipped_rounds,
            compiled_rounds=0 if sampler is None else sampler.compiled_rounds,
        )

    def has_results(self) -> bool:
        return any(record.times_s for record in self._records)

    def run(self) -> Generator[Progress, None, None]:
        """Measure; yield progress. Restore the user's state at the end, unless a pool was given."""
        policy, owns_pool = self._policy, self._pool is None
        with ExitStack() as stack:
            # 1. Unless a pool is given, copy the user's state, and restore it at the end.
            pool = self._pool or stack.enter_context(pooled(self.step, len(self.variants) + 1))
            guard = pool.guard  # pauses for other cells don't count
            now = lambda: clock.now() - guard.paused_s  # noqa: E731
            # Restoring the state takes as long as copying it.
            ends = (self.begun_s, guard.taking_s) if owns_pool else ()
            self.budget = Budget(self.budget_s, now, self._within, *ends)
            # 2. Warm up the baseline, which shows if steps can be repeated, then other variants.
            given = self.variants, self.budget
            first = self._first = yield from pool.baseline(*given)
            self._environment = environment(first.device)
            yield from self._ask_accuracy([first], guard.state)
            runners = yield from pool.others(first, *given, policy, self._grows)
            self._records = [runner.record for runner in runners]
            # 3. Shuffled rounds, in the time that the checks leave.
            timed, rounds_s, reserved_s = shares_of_time(warm(runners), policy, self.budget)
            self.budget.reserved_s += reserved_s
            self._sampler = Sampler(timed, rounds_s, self._records, self.budget)
            yield from self._sampler.run(policy)
            self.budget.reserved_s -= reserved_s
            if runners := warm(timed):  # empty if all variants failed in the rounds
                # 4. Memory, and measurements by extras, in untimed steps.
                if policy.measures_memory:
                    yield from self._measure_memory(runners)
                if policy.measures_memory or policy.proves or self._at_most_s:
                    for meter in meters():
                        yield from meter(runners, self.budget)
                # 5. Accuracy: compare steps of likely winners with the trace. Checks start from
                # the user's state and need memory, so runners' states are freed. A race keeps its
                # states, because the search uses its runners again.
                for runner in runners if owns_pool or policy.proves else ():
                    runner.warm = None
                if policy.checked != 0:
                    check, found = AccuracyCheck(runners[0], pool), self.result()
                    self._dropout_off = yield from check.run(runners, policy, found, self.budget)
            yield from self._ask_accuracy(working(runners)[1:], guard.state)

    def _ask_accuracy(self, runners: Sequence[Runner], start: Snapshot) -> Iterator[Progress]:
        """Record the accuracy function's number or error for each variant, outside the budget."""
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
        """Measure memory in untimed steps, if time for checks remains or the budget is minimal."""
        # On a CPU, torch's profiler counts the allocations; starting the profiler takes 0.3 s.
        needed_s = 0.3 + 3 * sum(runner.worst_s for runner in runners)
        if self.budget.allows(needed_s + checks_s(runners, self._policy)) or self.budget.is_minimal:
            with self.budget.compiling_excluded(needed_s):
                for runner in (one for one in runners if one.record.memory is None):
                    assert runner.warm is not None
                    yield Progress(0.0, f"memory of {runner.record.name}")
                    with runner.applied():
                        runner.warm.restore()
                        state = memory.state_tensors(self.step.models, self.step.optimizers)
                        given = runner.once, runner.device, state
                        try:
                            runner.record.memory = memory.needed(*given)
                        except Exception as error:
                            runner.fail(error)


@cache
def meters() -> tuple[Callable[[Sequence[Runner], Budget], Iterator[Progress]], ...]:
    """Return the measuring functions of installed extras, which run untimed steps."""
    return tuple(meter for every in provided("METERS") for meter in every)


@dataclass(frozen=True, eq=False)
class NamedAccuracy:
    """The user's accuracy function, with its name."""

    name: str
    function: Callable[..., object]

    def number(self, step: Step) -> float:
        """Call the function, with the model if it takes one argument, and return its number.

        Raises StepError if the function needs other arguments, fails, or gives no finite number.
        """
        needed, models = arguments_of(self.function), step.models
        if needed > 1 or (needed and len(models) != 1):
            takes = count(needed, "argument")
            several = f", and the step has {len(models)} models" if needed == 1 else ""
            why = f"{takes}{several}: name a function without arguments"
            raise StepError(f"{self.name} takes {why}")
        step.rewind()
        try:
            given: Any = interrupts.in_a_window(partial(self.function, *models[:needed]))
        except SpeedKitError:
            raise
        except Exception as error:
            raise StepError(f"{self.name} raises {in_a_line(error)}") from None
        if is_a(given, bool) or not is_a(given, numbers.Real):
            raise StepError(f"{self.name} returns {type(given).__name__}, not a number")
        if not math.isfinite(given):
            raise StepError(f"{self.name} returns {given}, which can't be compared")
        return float(given)


def named_accuracy(function: Any, name: str = "") -> NamedAccuracy | None:
    """Return a function with its name; None for None. Raises StepError if it isn't callable."""
    if function is None:
        return None
    if not callable(function):
        kind = type(function).__name__
        raise StepError(f"the accuracy must be a function that returns a number, not {kind}")
    own = getattr(function, "__name__", "")
    return NamedAccuracy(name or (own if own.isidentifier() else "accuracy"), function)


@interruptible_in_users_code
def benchmark(
    step: Callable[..., object],
    variants: str | Sequence[str] = ("baseline", "auto"),
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    budget_s: float | None = None,
    accuracy: Callable[..., object] | None = None,
) -> Comparison:
    """Measure `step()` under several variants in shuffled rounds; undo the step's changes.

    Args:
        step: A function without arguments, or `step(ctx)`: `ctx` is the variant's SpeedContext.
        variants: Names of plans, the baseline first, as a list or a string with commas. Plans that
            don't fit into the budget are left out; the report says so.
        model: The models that get the plans (default: all that the function's code reaches).
        optimizer: The models' optimizers (default: all that the function's code reaches).
        budget_s: Seconds for everything but compiling (default: 10, or more if a step is long).
        accuracy: A function that returns a number, which is shown for each variant. Use it to judge
            plans that change results, such as int8. Its time is not part of the budget.

    Returns:
        A Comparison: a record for each variant, with its ratio to the baseline and a verdict.

    Raises:
        StepError: The step can't be measured, or an argument is invalid.
        ArgumentError: `optimizer` is not a torch optimizer.
        ConfigError: A plan in `variants` has invalid values, or its file can't be read.

    Example::

        benchmark(train_step, "baseline,auto,bf16", budget_s=10)
    """
    names = arguments.names("variants", variants)
    budget_s = arguments.seconds("budget_s", budget_s)
    named = named_accuracy(accuracy)
    plans = [variant(name) for name in names]
    return drained(Benchmark(step_of(step, model, optimizer), plans, budget_s, accuracy=named))
