"""Warm-up of all variants, each from the user's own values, until its steps are alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from speedkit_jupyter.catalog.malloc import MUCH_BYTES
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.budget import Budget, few_digits
from speedkit_jupyter.rounds.runner import (
    MOST_OVERFLOWS,
    SETTLED_SHARE,
    Runner,
    compared_calls,
    release,
)
from speedkit_jupyter.rounds.sampler import LONG_S, OVERFLOW, Policy, Progress
from speedkit_jupyter.rounds.statistics import SELDOM
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.step import repeats
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue import heap

# A warm-up ends after this many steps, although neighbouring ones still differ.
MOST_STEPS = 12


@dataclass
class WarmUp:
    """Warm up this many variants of a step within a budget; the policy says which are far too slow.

    The baseline's first call is made within `watching`.
    """

    step: Step
    budget: Budget
    policy: Policy
    variants: int
    watching: Callable[[], AbstractContextManager[object]] = nullcontext
    _interruptions: clock.Interruptions = field(default_factory=clock.Interruptions, init=False)

    def baseline(self, runner: Runner, start: Snapshot) -> Generator[Progress, None, Runner]:
        """Warm up the variant that others are compared with; return it with the step's facts."""
        yield Progress(0.0, f"warming up {runner.record.name} (1 of {self.variants})")
        does = runner.facts.repeats
        try:
            with runner.applied(), repeats.optimizers_made(self.step.models) as made:
                self._until_alike(runner, 0.0)
        except StepError:
            raise
        except Exception as error:  # the calls of a schedule are numbered
            if runner.warm is None or does is not None:
                raise
            does = repeats.ended(error)
            release(error)
        first_s = runner.record.first_call_s or 0.0
        looks = does is None and self.budget.allows(2 * runner.fastest_s)
        if looks and repeats.is_suspicious(first_s, runner.fastest_s):
            does = compared_calls(runner, start)
        facts = replace(runner.facts, made=runner.facts.made or tuple(made), repeats=does)
        runner = replace(runner, facts=facts)
        if facts.afresh:
            runner.restarted(start)
        draws = start.draws()
        start.restore()  # every variant warms up from the user's values
        return replace(runner, facts=replace(facts, leaves=draws or start.has_changed))

    def others(
        self, first: Runner, others: Sequence[Runner], start: Snapshot
    ) -> Iterator[Progress]:
        """Warm up one after another; one that fails is a row, one without time is named."""
        for number, runner in enumerate(others, 2):
            if not self.budget.allows(2 * first.worst_s):
                leave_out(runner, first, self.budget)
                continue
            yield Progress(0.0, f"warming up {runner.record.name} ({number} of {self.variants})")
            begun_s, excluded_s = clock.now(), self.budget.excluded_s
            try:
                with runner.applied():
                    heap.occupy_free_addresses()
                    if runner.record.is_compiled:  # the first to do so loads Inductor
                        self.budget.exclude(clock.now() - begun_s)
                    if runner.facts.afresh:
                        runner.keep_state()
                    self._until_alike(runner, first.worst_s)
            except Exception as error:
                runner.fail(error)
                if runner.record.is_compiled:  # what it took was no step
                    self.budget.exclude(clock.now() - begun_s - self.budget.excluded_s + excluded_s)
            start.restore()
            is_slow = runner.times_slower(first) > self.policy.far_slower
            if is_slow and runner.fastest_s > first.worst_s and not runner.was_disturbed:
                runner.record.notes["dropped"] = far_slower(runner, first)
                runner.drop_state()

    def _until_alike(self, runner: Runner, usual_s: float) -> None:
        """Run steps until two are alike and nothing is compiled any more; note their cost.

        Raises the step's errors, and StepError if a GradScaler goes on skipping.
        """
        budget, record = self.budget, runner.record
        with nullcontext() if usual_s else self.watching():
            now, skipped, compiled = self._step(runner, usual_s)
        first_s = spent = last = now
        record.note_warm_up(first_s)
        # A guess for the next step: the first one is often the slowest, or compiles.
        expected_s = usual_s if compiled or not usual_s else now
        # A long step that beats the baseline's at once has nothing to settle that matters.
        is_quick = LONG_S <= now < usual_s and not (compiled or skipped)
        if is_quick or self._is_hopeless(runner, first_s, usual_s, compiled):
            runner.end_warm_up(now)
            return
        calls = 1
        runner.forget_times()
        while calls < MOST_OVERFLOWS and budget.allows(expected_s):
            fresh = runner.fresh_bytes.get(False, 0)
            now, skipped, compiled = self._step(runner, usual_s)
            spent, calls = spent + now, calls + 1
            if not compiled:
                runner.recent_s.append(now)
                expected_s = runner.worst_s
            later_s = spent - first_s
            # All warm-ups take at most a twentieth of the budget.
            is_over = later_s > 0.05 * budget.seconds / self.variants and not compiled
            is_alike = calls > 1 and not compiled and abs(now - last) < 0.2 * last
            # A variant that compiling did not make faster has nothing to settle that matters.
            lags = self.policy.counts_warm_up and runner.record.is_compiled and now > usual_s
            if lags and not (compiled or skipped):
                break
            waits = skipped or self._waits(runner, usual_s, calls, later_s, fresh)
            if not waits and (is_alike or is_over or calls > MOST_STEPS):
                break
            last = now
        if skipped:
            raise StepError(OVERFLOW if calls >= MOST_OVERFLOWS else "the budget ended in warm-up")
        runner.end_warm_up(now)
        record.note_warm_up(first_s, spent - calls * now)

    def _waits(
        self, runner: Runner, usual_s: float, calls: int, later_s: float, fresh_bytes: int
    ) -> bool:
        """Return whether more steps may show a variant to be faster, or the heap to be settled."""
        if not usual_s:  # the baseline, which gets less and less memory of the system at first
            now_bytes = runner.fresh_bytes.get(False, 0)
            return MUCH_BYTES <= now_bytes < (1 - SETTLED_SHARE) * fresh_bytes
        # If all steps were slower than any of the baseline's, other processes may have been in the
        # way: more steps are taken, for 2 % of the budget.
        is_slow = usual_s < runner.fastest_s and calls <= MOST_STEPS
        return is_slow and later_s < 0.02 * self.budget.seconds

    def _is_hopeless(self, runner: Runner, first_s: float, usual_s: float, compiled: bool) -> bool:
        """Return whether the first step alone tells a search that the variant is far too slow."""
        is_slow = 0 < 30 * usual_s < first_s > 0.1 * self.budget.seconds
        is_sure = not (compiled or runner.was_disturbed)
        return is_slow and is_sure and math.isfinite(self.policy.far_slower)

    def _step(self, runner: Runner, usual_s: float) -> tuple[float, bool, bool]:
        """Return the seconds of one step, whether a scaler skipped it, and whether it compiled."""
        graphs, scale = runner.record.compilations.graphs, runner.scale()
        self._interruptions.begin()
        with runner.record.compilations.counted():
            now = runner.timed()
        runner.note_step(now, self._interruptions.seconds(now) > SELDOM * now)
        skipped, compiled = runner.scale() < scale, runner.record.compilations.graphs > graphs
        # Blocks begin with the state after the first step that counts: warm-ups differ in length.
        if runner.warm is None and not skipped and not runner.facts.afresh:
            runner.keep_state()
        if compiled:
            self.budget.exclude(now - usual_s)
        for context in runner.contexts:
            runner.record.notes.update(context.notes)
        return now, skipped, compiled


def far_slower(runner: Runner, first: Runner) -> str:
    """Return how far a variant is behind the first one."""
    times = runner.times_slower(first)
    return f"far slower than {first.record.name}: {times:.1f} times in its fastest step"


def leave_out(runner: Runner, first: Runner, budget: Budget, far: float = math.inf) -> None:
    """Measure it no further, and say so: with its figure if it is slower by more than `far`."""
    short = f"{few_digits(budget.seconds)} s are too short"
    if budget.is_part:  # of a search, whose parts of the budget the user does not know
        short = "what was left of the budget is too short"
    told = f"{short} for so many variants of it"
    if runner.was_disturbed:
        told = f"the machine was busy; {short} to time it"
    elif runner.times_slower(first) > far:
        told = f"{far_slower(runner, first)}; {short} to time it"
    runner.record.notes["left out"] = told
    runner.drop_state()
