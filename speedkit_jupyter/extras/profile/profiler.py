"""Profiles a step: plain calls and profiled ones in turn, then everything put back."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from speedkit_jupyter.extras.profile import instruments
from speedkit_jupyter.extras.profile.costs import costs_of
from speedkit_jupyter.extras.profile.lines import LineTimes, sampled
from speedkit_jupyter.extras.profile.operators import names_of
from speedkit_jupyter.extras.profile.profile import Profile
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

# How many profiled calls are enough; about how often plain and profiled calls take turns.
ENOUGH, TURNS = 100, 10
# A call that takes more than the first share of the budget is the profile; one that takes less than
# the second is made once more before each call that counts.
LONG, SHORT = 0.5, 0.02
# Modules and operators take about as many calls' time, and get up to this share of the budget.
COSTS, COSTS_SHARE = 10, 0.5
# The events of a longer call would fill the memory.
LONGEST_TRACED_S = 3.0
# Lines are sampled for these seconds, within this share of the budget.
SAMPLING_S, SAMPLING_SHARE = 1.0, 0.15
# What is tried afterwards may take this share of it.
TRYING_SHARE = 0.1


@dataclass(frozen=True)
class Isolated:
    """A profiled step that is isolated still: `call` makes it once, `settle` puts it back to where
    it began, `affords` says whether there is time for so many seconds. One that is short is timed
    behind a call that warms the caches.
    """

    call: Callable[[], object]
    settle: Callable[[], object]
    affords: Callable[[float], bool]
    device: torch.device
    is_short: bool = False

    def timed_s(self) -> float:
        if self.is_short:
            self.call()
        return clock.timed(self.call, self.device)


class Profiler:
    """Drain `run()`, then read `result()`.

    `budget_s` are the seconds for all of it; a call that takes most of them is the only one.
    `command` is how the profile is repeated; `called` is how the user calls models, by their ids.
    `afterwards` is called at the end, while the step is isolated still. Whatever happens, all that
    the step changes is put back. Raises StepError.
    """

    def __init__(
        self, step: Step, budget_s: float | None, command: str, called: Mapping[int, str]
    ) -> None:
        self.step, self.called = step, called
        self.budget_s = seconds("budget_s", budget_s) or DEFAULT_S
        self.begun_s: float | None = None
        self.afterwards: Callable[[Isolated], object] | None = None
        self._device = device = device_of(step)
        self._profile = Profile(
            device=device.type, names=cells(), environment=environment(device), command=command
        )
        self._context: Any = None
        self._first_s, self._is_alone = 0.0, False
        self._watch = clock.Stopwatch(device, clock.now, clock.Interruptions())

    def result(self) -> Profile:
        return self._profile

    def has_results(self) -> bool:
        return bool(self._profile.taken)

    def run(self) -> Generator[Progress, None, None]:
        """Measure; yield after every call. What the step changed is put back at the end."""
        budget = Budget(self.budget_s, begun_s=self.begun_s)
        try:
            with self.step.guarded() as guard:
                yield from self._measured(guard, budget)
        except KeyboardInterrupt:
            self._profile.is_interrupted = True
            raise

    def _measured(self, guard: MeasurementGuard, budget: Budget) -> Generator[Progress, None, None]:
        profile = self._profile
        self._context = in_force_or_none(self.step.models)
        budget.reserved_s = guard.taking_s
        yield Progress(0.0, "first call")
        with self._sampled() as recorder:
            self._watched(lambda: self._profiled(recorder, True))
            profile.first = first = recorder.split
        budget.exclude(first.seconds["compiling"])
        self._first_s = first.total_s - first.seconds["compiling"]
        is_long = self._first_s > LONG * self.budget_s
        state = guard.state if is_long and not self.afterwards else self.step.state()
        if is_long:
            profile.why_no_costs = "there was no time for a second call"
            self._find_lines(first.samples)
            yield Progress(1.0, "the call is long: it is the profile")
        else:
            try:
                yield from self._in_full(state, budget)
            except StepError:
                raise
            except Exception as error:
                if profile.plain_s:
                    raise
                # Another call can't follow (a schedule has so many steps): each begins anew.
                self.step.tell([ended(error).line])
                state, self._is_alone = guard.state, True
                budget.reserved_s = guard.taking_s
                yield from self._in_full(state, budget)
        if self.afterwards is not None:
            yield Progress(1.0, "one more call, watched")
            call = partial(self._aside, self._call)
            trying_s = TRYING_SHARE * self.budget_s
            afford = lambda s: s <= trying_s  # noqa: E731
            self.afterwards(Isolated(call, state.restore, afford, self._device, self._is_short))

    @property
    def _call_s(self) -> float:
        return self._profile.step_s * self._profile.steps

    def _in_full(self, state: Snapshot, budget: Budget) -> Generator[Progress, None, None]:
        """Find parts, then lines, then modules and operators, each from calls of their own."""
        left_s = max(budget.left_s, 0.0)
        costs_s = min(COSTS * self._first_s, COSTS_SHARE * left_s)
        sampling_s = min(SAMPLING_S, SAMPLING_SHARE * left_s)
        trying_s = 0.0 if self.afterwards is None else TRYING_SHARE * self.budget_s
        budget.reserved_s += costs_s + sampling_s + trying_s
        yield from self._in_turn(state, budget)
        budget.reserved_s -= sampling_s
        yield Progress(budget.share, "lines")
        self._sample_lines(state, budget, sampling_s)
        budget.reserved_s -= costs_s
        needed_s = COSTS * self._call_s
        if self._call_s > LONGEST_TRACED_S:
            why = f"a call of {self._call_s:.0f} s is too long: profile fewer steps"
        elif not budget.allows(needed_s):
            more = few_digits(math.ceil(max(needed_s / COSTS_SHARE, 2 * self.budget_s)))
            why = f"there was no time for them (--budget {more})"
        else:
            yield Progress(budget.share, "modules and operators")
            why = self._find_costs(state, budget)
        self._profile.why_no_costs = why

    def _in_turn(self, state: Snapshot, budget: Budget) -> Generator[Progress, None, None]:
        """Make plain calls and as many profiled ones, each from the same state."""
        profile, number, slowest_s = self._profile, 1, 0.0
        profile.timed_s = profile.held_up_s = 0.0
        while len(profile.splits) < ENOUGH and (
            not profile.splits or budget.allows(2 * slowest_s * number)
        ):
            begun_s, plain_s = clock.now(), list[float]()
            for _ in range(number):
                self._settle(state)
                self._aside(partial(self._watched, self._call))
                plain_s.append(self._watch.wall_s)
            profile.splits += self._in_a_row(number, state, is_whole=False)
            profile.plain_s += plain_s
            if profile.is_costly:
                profile.whole += self._in_a_row(number, state, is_whole=True)
            slowest_s = max(slowest_s, (clock.now() - begun_s) / (2 * number))
            taken = len(profile.splits)
            if taken == 1:
                affordable = min(ENOUGH - 1, max(budget.left_s, 0.0) / (2 * slowest_s))
                number = max(1, round(affordable / TURNS))
            yield Progress(min(max(budget.share, taken / ENOUGH), 1.0), f"call {taken}")

    def _in_a_row(self, number: int, state: Snapshot, is_whole: bool) -> Iterator[Split]:
        """Profile some calls, each from the same state."""
        recorder = Recorder()
        with instruments.installed(recorder, within=not is_whole):
            for _ in range(number):
                state.restore()
                yield self._profiled(recorder, is_whole=is_whole)

    def _sample_lines(self, state: Snapshot, budget: Budget, enough_s: float) -> None:
        """Find which lines of the user's the time goes to; one call at least."""
        samples, end_s = list[LineSample](), clock.now() + enough_s
        try:
            with self._sampled() as recorder:
                while True:
                    state.restore()
                    samples += self._profiled(recorder).samples
                    if clock.now() >= end_s or not budget.allows(2 * self._call_s):
                        break
        finally:
            self._find_lines(samples)

    def _find_lines(self, samples: list[LineSample]) -> None:
        shares = {part: self._profile.share(part) for part in PARTS}
        self._profile.lines = LineTimes.of(samples, shares)

    def _find_costs(self, state: Snapshot, budget: Budget) -> str:
        """Find those of modules and operators, or return why there are none."""
        call, settle = partial(self._aside, self._call), partial(self._settle, state)
        names = names_of(self.step.models, self.called)
        try:
            found = costs_of(call, settle, self._device, names, self._call_s, budget)
        except StepError as error:
            return str(error)
        except Exception as error:  # what can't be traced hides nothing else
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        self._profile.costs = found
        return ""

    def _aside(self, call: Callable[[], object]) -> None:
        """Call what runs the step, once, and tells nothing to a split."""
        with self.step.around_blocks():
            call()

    def _settle(self, state: Snapshot) -> None:
        """Go back to the state; a short step then warms the caches."""
        state.restore()
        if self._is_short:
            self._aside(self._call)

    @property
    def _is_short(self) -> bool:
        return not self._is_alone and self._first_s < SHORT * self.budget_s

    def _watched(self, call: Callable[[], object]) -> None:
        """Count for how long other processes keep a call from the cores."""
        self._watch.begin()
        call()
        self._watch.end()
        self._profile.timed_s += self._watch.wall_s
        self._profile.held_up_s += self._watch.waited_s

    @contextmanager
    def _sampled(self) -> Iterator[Recorder]:
        """Let calls be profiled in every detail, while a timer looks which lines are at work."""
        recorder = Recorder()
        with instruments.installed(recorder, within=True), sampled(recorder):
            yield recorder

    def _profiled(
        self, recorder: Recorder, is_first: bool = False, is_whole: bool = False
    ) -> Split:
        """Make one call; `is_whole`: without what happens within the parts.

        A short step is called once before: Python forgets what it knows of the types that are
        patched, which costs a tenth.
        """
        told = instruments.told(recorder, sees_functions=not (is_first or is_whole))
        with self.step.around_blocks(), told:
            if self._is_short and not is_first:
                self._call(recorder)
            self._call(recorder)
        return recorder.split

    @user_code_boundary  # what the timer finds of ours is none of the caller's lines
    def _call(self, recorder: Recorder | None = None) -> None:
        with nullcontext() if recorder is None else recorder.run():
            self.step.call(self._context)
            if recorder is not None and self._device.type != "cpu":
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
    """Return where the time of `step()` goes: data, host to device, forward, backward, optimizer,
    synchronizations (with their lines), compiling, and the rest.

    The step may be a loop over a loader: it is divided by the optimizer's steps. Plain calls and
    profiled ones are made in turn for `budget_s` seconds (10 without it), at least one. Models and
    optimizers that are not given are those that the function's code reaches. Raises StepError
    where the step can't be measured; whatever happens, all that it changed is put back.
    """
    begun_s = clock.now()
    command = f"profile({getattr(step, '__name__', 'step')})"
    profiler = profiler_of(step, model, optimizer, budget_s, command)
    profiler.begun_s = begun_s
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
) -> Profiler:
    """Return the profiler of a function; `models` are further names of models by their ids.

    Raises StepError.
    """
    called = models_of(step) | dict(models)
    return Profiler(step_of(step, model, optimizer), budget_s, command, called)


def models_of(step: Callable[..., object]) -> dict[int, str]:
    """Return the names that models have where the function was defined, by the models' ids."""
    function = inspect.unwrap(step)
    if not inspect.isfunction(function):
        return {}
    names: dict[str, Any] = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    return {
        id(value): name
        for name, value in reversed(names.items())
        if isinstance(value, torch.nn.Module) and not name.startswith("_")
    }
