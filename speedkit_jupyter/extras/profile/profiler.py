"""Profiles a step: plain calls and profiled calls in turn, then everything is put back."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from speedkit_jupyter.extras.profile import instruments
from speedkit_jupyter.extras.profile.costs import costs_of, names_of
from speedkit_jupyter.extras.profile.profile import LineTimes, Profile
from speedkit_jupyter.extras.profile.split import PARTS, LineSample, Recorder, Split
from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.plans.applying import in_force_or_none
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.budget import DEFAULT_S, Budget, few_digits
from speedkit_jupyter.rounds.from_function import step_of
from speedkit_jupyter.rounds.record import environment
from speedkit_jupyter.rounds.sampler import Progress
from speedkit_jupyter.rounds.timeit_run import device_of
from speedkit_jupyter.state.guard import MeasurementGuard
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.step.repeats import ended
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support.arguments import seconds
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.source_lines import cells
from speedkit_jupyter.support.tracebacks import user_code_boundary
from speedkit_jupyter.torchglue.interrupts import interruptible

# Profiled calls are enough at this number: the median of their shares hardly moves any more.
ENOUGH = 100
# Plain and profiled calls take turns about this often. Each turn changes torch's classes, and
# Python 3.13 gives up its fast method look-up after a thousand changes.
TURNS = 10
# A first call that takes more than LONG of the budget is the profile; a call that takes less than
# SHORT of it is repeated before each call that counts, to warm the caches.
LONG, SHORT = 0.5, 0.02
# Modules and operators take about as long as COSTS calls, and get up to COSTS_SHARE of the budget.
COSTS, COSTS_SHARE = 10, 0.5
# The profiler's events of a longer call would fill the memory.
LONGEST_TRACED_S = 3.0
# Lines are sampled for SAMPLING_S, a thousand samples, within SAMPLING_SHARE of the budget.
SAMPLING_S, SAMPLING_SHARE = 1.0, 0.15


@dataclass(frozen=True)
class IsolatedStep:
    """A step under a measurement guard.

    `call` runs it once, `settle` puts its state back, and `trials_s` are the seconds that further
    trials of it may take. A step that `is_short` is timed after a call that warms the caches.
    """

    call: Callable[[], object]
    settle: Callable[[], object]
    device: torch.device
    is_short: bool = False
    trials_s: float = 0.0

    def warm(self) -> None:
        """Call a short step once."""
        if self.is_short:
            self.call()

    def timed_s(self) -> float:
        """Return the seconds of a call."""
        self.warm()
        return clock.timed(self.call, self.device)


class Profiler:
    """Drain `run()`, then read `result()`.

    `budget_s` are seconds for everything, from `begun_s` on the clock, or from now. `command` is
    the code that repeats the profile, `called` are the user's names of models, by their ids. All
    that the step changes is put back. Raises StepError if it can't be measured.
    """

    def __init__(
        self,
        step: Step,
        budget_s: float | None,
        command: str,
        called: Mapping[int, str],
        begun_s: float | None = None,
    ) -> None:
        self.step, self.called, self._begun_s = step, called, begun_s
        self.budget_s = seconds("budget_s", budget_s) or DEFAULT_S
        self._device = device = device_of(step)
        self._profile = Profile(
            device=device.type, names=cells(), environment=environment(device), command=command
        )
        self._context: Any = None
        self._interruptions = clock.Interruptions()

    def result(self) -> Profile:
        return self._profile

    def has_results(self) -> bool:
        return bool(self._profile.taken)

    def run(self) -> Generator[Progress, None, None]:
        """Measure; yield after every call. The state of the step is put back at the end."""
        with self.guarded() as guard:
            yield from self.measured(guard)

    @contextmanager
    def guarded(self) -> Iterator[MeasurementGuard]:
        """Put back everything that the step changes in the block; note an interruption."""
        try:
            with self.step.guarded() as guard:
                yield guard
        except KeyboardInterrupt:
            self._profile.is_interrupted = True
            raise

    def measured(
        self, guard: MeasurementGuard, kept: float = 0.0
    ) -> Generator[Progress, None, IsolatedStep]:
        """Measure under a guard; return the step for trials, for which a share of the budget is
        `kept`.
        """
        budget, profile = Budget(self.budget_s, begun_s=self._begun_s), self._profile
        self._context = in_force_or_none(self.step.models)
        budget.reserved_s = guard.taking_s
        yield Progress(0.0, "first call")
        with self._sampled() as recorder:
            self._timed_s(partial(self._profiled, recorder, sees_functions=False))
            profile.first = first = recorder.split
        compiling_s = first.seconds["compiling"]
        budget.exclude(compiling_s)
        self._first_s = first.total_s - compiling_s
        is_long = self._first_s > LONG * self.budget_s
        state = guard.state if is_long and not kept else self.step.state()
        isolated = self._isolated(state, self._first_s < SHORT * self.budget_s, kept)
        if is_long:
            profile.why_no_costs = "there was no time for a second call"
            self._find_lines(first.samples)
            yield Progress(1.0, "the call is long: it is the profile")
            return isolated
        try:
            yield from self._in_full(isolated, budget)
        except StepError:
            raise
        except Exception as error:
            if profile.plain_s:
                raise
            # No other call can follow (a schedule has a number of steps): each begins anew.
            self.step.tell([ended(error).line])
            isolated = self._isolated(guard.state, False, kept)
            budget.reserved_s = guard.taking_s
            yield from self._in_full(isolated, budget)
        return isolated

    def _isolated(self, state: Snapshot, is_short: bool, kept: float) -> IsolatedStep:
        def call() -> None:
            with self.step.around_blocks():
                self._call()

        return IsolatedStep(call, state.restore, self._device, is_short, kept * self.budget_s)

    @property
    def _call_s(self) -> float:
        return self._profile.step_s * self._profile.steps

    def _in_full(self, step: IsolatedStep, budget: Budget) -> Generator[Progress, None, None]:
        """Find parts, then lines, then modules and operators, each from calls of their own."""
        left_s = max(budget.left_s, 0.0)
        costs_s = min(COSTS * self._first_s, COSTS_SHARE * left_s)
        sampling_s = min(SAMPLING_S, SAMPLING_SHARE * left_s)
        budget.reserved_s += costs_s + sampling_s + step.trials_s
        yield from self._in_turn(step, budget)
        budget.reserved_s -= sampling_s
        yield Progress(budget.share, "lines")
        self._sample_lines(step, budget, sampling_s)
        budget.reserved_s -= costs_s
        needed_s = COSTS * self._call_s
        if self._call_s > LONGEST_TRACED_S:
            why = f"a call of {self._call_s:.0f} s is too long: profile fewer steps"
        elif not budget.allows(needed_s):
            more = few_digits(math.ceil(max(needed_s / COSTS_SHARE, 2 * self.budget_s)))
            why = f"there was no time for them (--budget {more})"
        else:
            yield Progress(budget.share, "modules and operators")
            why = self._find_costs(step, budget)
        self._profile.why_no_costs = why

    def _in_turn(self, step: IsolatedStep, budget: Budget) -> Generator[Progress, None, None]:
        """Make plain calls and profiled calls in turn, each from the same state."""
        profile, number, slowest_s = self._profile, 1, 0.0
        profile.timed_s = profile.held_up_s = 0.0  # of plain calls alone
        while len(profile.splits) < ENOUGH and (
            not profile.splits or budget.allows(2 * slowest_s * number)
        ):
            begun_s, plain_s = clock.now(), list[float]()
            for _ in range(number):
                step.settle()
                step.warm()
                plain_s.append(self._timed_s(step.call))
            profile.splits += self._in_a_row(number, step, within=True)
            profile.plain_s += plain_s
            if profile.is_costly:
                profile.whole += self._in_a_row(number, step, within=False)
            slowest_s = max(slowest_s, (clock.now() - begun_s) / (2 * number))
            taken = len(profile.splits)
            if taken == 1:
                affordable = min(ENOUGH - 1, max(budget.left_s, 0.0) / (2 * slowest_s))
                number = max(1, round(affordable / TURNS))
            yield Progress(min(max(budget.share, taken / ENOUGH), 1.0), f"call {taken}")

    def _in_a_row(self, number: int, step: IsolatedStep, within: bool) -> Iterator[Split]:
        """Profile some calls, each from the same state."""
        recorder = Recorder()
        with instruments.installed(recorder, within=within):
            for _ in range(number):
                step.settle()
                yield self._profiled(recorder, within, step.is_short)

    def _sample_lines(self, step: IsolatedStep, budget: Budget, enough_s: float) -> None:
        """Find the time of the user's lines, from one call at least."""
        samples, end_s = list[LineSample](), clock.now() + enough_s
        try:
            with self._sampled() as recorder:
                while True:
                    step.settle()
                    samples += self._profiled(recorder, is_short=step.is_short).samples
                    if clock.now() >= end_s or not budget.allows(2 * self._call_s):
                        break
        finally:
            self._find_lines(samples)

    def _find_lines(self, samples: list[LineSample]) -> None:
        shares = {part: self._profile.share(part) for part in PARTS}
        self._profile.lines = LineTimes.of(samples, shares)

    def _find_costs(self, step: IsolatedStep, budget: Budget) -> str:
        """Find the costs of modules and operators, or return why there are none."""

        def settle() -> None:
            step.settle()
            step.warm()

        names = names_of(self.step.models, self.called)
        try:
            found = costs_of(step.call, settle, self._device, names, self._call_s, budget)
        except StepError as error:
            return str(error)
        except Exception as error:  # code that can't be traced still has its parts and lines
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        self._profile.costs = found
        return ""

    def _timed_s(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call; note those in which other processes may have held it up."""
        self._interruptions.begin()
        taken_s = clock.timed(call, self._device)
        self._profile.timed_s += taken_s
        self._profile.held_up_s += self._interruptions.seconds(taken_s)
        return taken_s

    @contextmanager
    def _sampled(self) -> Iterator[Recorder]:
        """Let calls be profiled in every detail, with a timer that samples lines."""
        recorder = Recorder()
        with instruments.installed(recorder, within=True), instruments.sampled(recorder):
            yield recorder

    def _profiled(
        self, recorder: Recorder, sees_functions: bool = True, is_short: bool = False
    ) -> Split:
        """Make one profiled call.

        A short step is called once before: patching empties Python's caches of types, and the next
        call takes a tenth longer.
        """
        with self.step.around_blocks(), instruments.told(recorder, sees_functions):
            if is_short:
                self._call(recorder)
            self._call(recorder)
        return recorder.split

    @user_code_boundary  # the timer sees none of our lines as the caller's
    def _call(self, recorder: Recorder | None = None) -> None:
        if recorder is None:
            self.step.call(self._context)
            return
        with recorder.run():
            self.step.call(self._context)
            if self._device.type != "cpu":
                with recorder.within("synchronizations"):
                    synchronize(self._device)


@interruptible
def profile(
    step: Callable[..., object],
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    budget_s: float | None = None,
) -> Profile:
    """Return where the time of `step()` goes, and put back everything that it changes.

    The parts are data, host to device, forward, backward, optimizer, synchronizations (with their
    lines), compiling, and the rest.

    Args:
        step: a function without arguments. It may be a loop over a loader: its time is divided by
            the optimizer's steps.
        model: the models of the step; by default those that the function's code reaches.
        optimizer: the optimizers of the step; by default those that the function's code reaches.
        budget_s: seconds in which plain and profiled calls are made in turn (10 by default); one
            call is made at least.

    Returns:
        A Profile: `rows()` has seconds and shares by part, `lines` and `costs` the details.

    Raises:
        StepError: if the step can't be measured.
    """
    begun_s, command = clock.now(), f"profile({getattr(step, '__name__', 'step')})"
    profiler = profiler_of(step, model, optimizer, budget_s, command, begun_s=begun_s)
    for _ in profiler.run():
        pass
    return profiler.result()


def profiler_of(
    step: Callable[..., object],
    model: torch.nn.Module | Sequence[torch.nn.Module] | None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    budget_s: float | None,
    command: str,
    models: Mapping[int, str] = MappingProxyType({}),
    begun_s: float | None = None,
) -> Profiler:
    """Return the profiler of a function; `models` are further names of models, by their ids.

    Raises StepError if the function can't be measured.
    """
    called = models_of(step) | dict(models)
    return Profiler(step_of(step, model, optimizer), budget_s, command, called, begun_s)


def models_of(step: Callable[..., object]) -> dict[int, str]:
    """Return the names of models where the function was defined, by the models' ids."""
    function = inspect.unwrap(step)
    if not inspect.isfunction(function):
        return {}
    names: dict[str, Any] = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    return {
        id(value): name
        for name, value in reversed(names.items())
        if isinstance(value, torch.nn.Module) and not name.startswith("_")
    }
