"""Profile a step in turns of plain and profiled calls, and restore all state."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from speedkit_jupyter.extras.profile import instruments
from speedkit_jupyter.extras.profile.costs import OperatorTrace, names_of
from speedkit_jupyter.extras.profile.instruments import Recorder
from speedkit_jupyter.extras.profile.profile import Profile, Split
from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.plans.applying import in_force_or_none
from speedkit_jupyter.rounds import busy_machine, clock
from speedkit_jupyter.rounds.budget import DEFAULT_BUDGET_S, Budget
from speedkit_jupyter.rounds.comparison import Progress, drained, environment
from speedkit_jupyter.rounds.timing import device_of
from speedkit_jupyter.state.measurement_guard import MeasurementGuard
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.step.step import Step, step_of
from speedkit_jupyter.step.watching import ended
from speedkit_jupyter.support.arguments import seconds
from speedkit_jupyter.support.exceptions import StepError, in_a_line
from speedkit_jupyter.support.tracebacks import user_code_boundary
from speedkit_jupyter.torchglue.interrupts import interruptible_in_users_code

# ENOUGH_CALLS profiled calls give stable shares of parts. ENOUGH_S seconds, half of them in plain
# calls, give about a thousand samples of lines.
ENOUGH_CALLS, ENOUGH_S = 100, 2.0
# Turns of plain and profiled calls, after a first turn with cold caches. Each turn changes torch's
# classes, and Python 3.13 stops caching method look-ups after a thousand changes.
TURNS = 10
# If the first call takes more than LONG_SHARE of the budget, no other call is profiled. If it takes
# less than SHORT_SHARE, an untimed call precedes each timed call, to warm the caches.
LONG_SHARE, SHORT_SHARE = 0.5, 0.02
# Number of calls to trace: further calls changed the shares by less than the noise between runs.
MOST_TRACED = 5
# Time reserved for modules and operators: COST_CALLS calls, at most COST_SHARE of the time left.
COST_CALLS, COST_SHARE = 10, 0.5
# Longest call to trace: the events of longer calls would fill memory.
LONGEST_TRACED_S = 3.0


@dataclass(frozen=True)
class IsolatedStep:
    """A step inside a measurement guard; `settle` restores the step's state.

    `begin` prepares a timed call. If `is_short`, this includes an untimed call, because patching
    clears Python's type caches.
    """

    call: Callable[[], object]
    settle: Callable[[], object]
    device: torch.device
    is_short: bool = False

    def begin(self) -> None:
        self.settle()
        if self.is_short:
            self.call()


class Profiler:
    """Profile a step: drain `run()`, then read `result()`.

    `budget_s` is the total budget in seconds, from `begun_s` on the clock (default: now). `command`
    is the code that repeats the profile. All changes by the step are undone. Raises StepError if
    the step can't be measured.
    """

    def __init__(
        self, step: Step, budget_s: float | None, command: str, begun_s: float | None = None
    ) -> None:
        self.step, self.begun_s = step, begun_s
        self.budget_s = seconds("budget_s", budget_s) or DEFAULT_BUDGET_S
        self._device = device = device_of(step)
        where = environment(device)
        self._profile = Profile(device=device.type, environment=where, command=command)
        self._context: Any = None
        self._interruptions = busy_machine.Interruptions()

    def result(self) -> Profile:
        return self._profile

    def has_results(self) -> bool:
        return bool(self._profile.taken)

    def run(self) -> Generator[Progress, None, None]:
        """Measure, and yield progress. The state of the step is restored at the end."""
        with self.guarded() as guard:
            yield from self.measured(guard)

    @contextmanager
    def guarded(self) -> Iterator[MeasurementGuard]:
        """At the end of the block, undo all changes by the step; note if Ctrl-C ended the block."""
        try:
            with self.step.guarded() as guard:
                yield guard
        except KeyboardInterrupt:
            self._profile.is_interrupted = True
            raise

    def measured(
        self, guard: MeasurementGuard, kept_s: float = 0.0
    ) -> Generator[Progress, None, IsolatedStep]:
        """Measure inside a guard; leave `kept_s` of the budget for calls of the returned step."""
        budget, profile = Budget(self.budget_s, begun_s=self.begun_s), self._profile
        self._context = in_force_or_none(self.step.models)
        budget.reserved_s = guard.taking_s + kept_s
        yield Progress(0.0, "first call")
        with instruments.installed(recorder := Recorder()), instruments.sampled(recorder):
            self._timed_s(partial(self._profiled, recorder, sees_functions=False))
            profile.first = first = recorder.split
        compiling_s = first.seconds["compiling"]
        budget.exclude(compiling_s)
        first_s = first.total_s - compiling_s
        is_long = first_s > LONG_SHARE * self.budget_s
        state = guard.state if is_long and not kept_s else self.step.state()
        isolated = self._isolated(state, first_s < SHORT_SHARE * self.budget_s)
        if is_long:
            profile.why_no_costs = "there was no time for a second call"
            yield Progress(1.0, "the call is long: it is the profile")
            return isolated
        try:
            yield from self._in_full(isolated, budget, first_s)
        except StepError:
            raise
        except Exception as error:
            if profile.plain_s:
                raise
            # The step can't be repeated (a schedule ends), so calls start from the initial state.
            self.step.tell([ended(error).line])
            isolated = self._isolated(guard.state, False)
            budget.reserved_s = guard.taking_s + kept_s
            yield from self._in_full(isolated, budget, first_s)
        return isolated

    def _isolated(self, state: Snapshot, is_short: bool) -> IsolatedStep:
        def call() -> None:
            with self.step.around_blocks():
                self._call()

        return IsolatedStep(call, state.restore, self._device, is_short)

    def _in_full(
        self, step: IsolatedStep, budget: Budget, first_s: float
    ) -> Generator[Progress, None, None]:
        """Measure parts and lines, then modules and operators in separate calls."""
        costs_s = min(COST_CALLS * first_s, COST_SHARE * max(budget.left_s, 0.0))
        budget.reserved_s += costs_s
        yield from self._in_turn(step, budget)
        budget.reserved_s -= costs_s
        call_s = self._profile.step_s * self._profile.steps
        needed_s = COST_CALLS * call_s
        if call_s > LONGEST_TRACED_S:
            why = f"a call of {call_s:.0f} s is too long: profile fewer steps"
        elif not budget.allows(needed_s):
            more = math.ceil(max(needed_s / COST_SHARE, 2 * self.budget_s))
            why = f"there was no time for them (--budget {more})"
        else:
            yield Progress(budget.share, "modules and operators")
            why = self._find_costs(step, budget, call_s)
        self._profile.why_no_costs = why

    def _in_turn(self, step: IsolatedStep, budget: Budget) -> Generator[Progress, None, None]:
        profile, number, slowest_s = self._profile, 1, 0.0
        profile.timed_s = profile.held_up_s = 0.0  # from here on, sums over plain calls only
        for turn in range(1 + TURNS):
            if turn and not budget.allows(2 * slowest_s * number):
                break
            begun_s, plain_s = clock.now(), list[float]()
            for _ in range(number):
                step.begin()
                plain_s.append(self._timed_s(step.call))
            with instruments.installed(recorder := Recorder()), instruments.sampled(recorder):
                for _ in range(number):
                    step.begin()
                    profile.splits.append(self._profiled(recorder))
            profile.plain_s += plain_s
            if profile.is_costly:
                with instruments.installed(recorder, within=False):
                    for _ in range(number):
                        step.begin()
                        profile.whole.append(self._profiled(recorder, sees_functions=False))
            pace_s = (clock.now() - begun_s) / (2 * number)
            slowest_s = max(slowest_s, pace_s) if turn > 1 else pace_s
            if turn <= 1:  # set twice, because turn 0 has cold caches
                enough_s = min(max(2 * ENOUGH_CALLS * pace_s, ENOUGH_S), max(budget.left_s, 0.0))
                number = max(1, math.ceil(enough_s / (2 * pace_s * TURNS)))
            yield Progress(max(budget.share, turn / TURNS), f"call {len(profile.splits)}")

    def _find_costs(self, step: IsolatedStep, budget: Budget, call_s: float) -> str:
        """Trace at least one call and set the profile's costs; return an error's text, if any."""
        (names, kinds), trace = names_of(self.step), OperatorTrace()
        try:
            # The profiler makes calls with short operators up to four times as long.
            while trace.calls < MOST_TRACED and (not trace.calls or budget.allows(4 * call_s)):
                step.begin()
                trace.add(step.call, names, self._device)
        except Exception as error:  # parts and lines remain valid
            return in_a_line(error)
        self._profile.costs = trace.costs(kinds)
        return ""

    def _timed_s(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call; add them, and delays by other processes, to the profile."""
        self._interruptions.begin()
        taken_s = clock.timed(call, self._device)
        self._profile.timed_s += taken_s
        self._profile.held_up_s += self._interruptions.seconds(taken_s)
        return taken_s

    def _profiled(self, recorder: Recorder, sees_functions: bool = True) -> Split:
        with self.step.around_blocks(), instruments.recorded(recorder, sees_functions):
            self._call(recorder)
        return recorder.split

    @user_code_boundary  # samples ignore the lines that called SpeedKit
    def _call(self, recorder: Recorder | None = None) -> None:
        if recorder is None:
            self.step.call(self._context)
            return
        with recorder.run():
            self.step.call(self._context)
            if self._device.type != "cpu":
                with recorder.within("synchronizations"):
                    synchronize(self._device)


@interruptible_in_users_code
def profile(
    step: Callable[..., object],
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    budget_s: float | None = None,
) -> Profile:
    """Return the time of `step()` by part, and undo the changes that the calls made.

    The parts are data, host to device, forward, backward, optimizer, synchronizations (with their
    lines), compiling, and the rest.

    Args:
        step: a function without arguments. It may loop over a loader; the time of a call is then
            divided by the number of optimizer steps.
        model: the models of the step (default: all models that the function's code reaches).
        optimizer: the optimizers of the step (default: all that the function's code reaches).
        budget_s: total seconds except compiling (default: 10); at least one call is made.

    Returns:
        A Profile: `rows()` has the seconds and the share of each part, `lines` the shares of lines,
        and `costs` the shares of modules and operators (None if they were not traced).

    Raises:
        StepError: the step can't be measured, or an argument is invalid.
        ArgumentError: `optimizer` is not a torch optimizer.

    Example::

        profile(train_step, budget_s=10).rows()
    """
    begun_s, command = clock.now(), f"profile({getattr(step, '__name__', 'step')})"
    return drained(Profiler(step_of(step, model, optimizer), budget_s, command, begun_s))
