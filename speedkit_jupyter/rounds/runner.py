"""Variants at work, and the pool of them that the benchmarks of one search share."""

from __future__ import annotations

import gc
import math
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from speedkit_jupyter.machines import devices
from speedkit_jupyter.plans import applying
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.planning import together
from speedkit_jupyter.right.judge import StepJudge
from speedkit_jupyter.right.observer import Enough, Key, Look, ObservedRun, Observer
from speedkit_jupyter.right.reference import parameters_of
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.rounds.statistics import SELDOM
from speedkit_jupyter.state.guard import MeasurementGuard
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.step import memory
from speedkit_jupyter.step.step import Step, refuse_unrun_result, reports_out_of_data
from speedkit_jupyter.step.watching import (
    UNKNOWN,
    Repeats,
    StepFacts,
    StepWork,
    counted,
    judged,
    watching,
)
from speedkit_jupyter.support.exceptions import StepError, in_a_line
from speedkit_jupyter.support.tracebacks import user_code_boundary
from speedkit_jupyter.torchglue import confinement, heap, interrupts

# A step, or a block of steps, is expected to take as long as the slowest of the last RECENT.
RECENT = 8
# Steps in a row that a GradScaler may skip, which halves its factor each time: from 2**16 to
# 2**-14, the smallest normal number of fp16.
MOST_OVERFLOWS = 30
OVERFLOW = "the GradScaler skipped every optimizer step: gradients overflow"
# A warm-up ends after this many steps, although neighbouring ones still differ.
MOST_STEPS = 12


@dataclass
class Runner:
    """A variant while it runs: a context for each model, and the state at the start of rounds."""

    step: Step
    contexts: list[SpeedContext]
    record: Record
    facts: StepFacts = UNKNOWN
    warm: Snapshot | None = field(default=None, repr=False)
    step_s: float = 0.0  # about how long a step takes
    fastest_s: float = 0.0  # of the warm-up; whether other processes may have disturbed that step:
    was_disturbed: bool = False
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT), repr=False)
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    # The least bytes that a step got from the system, by whether the heap is kept.
    fresh_bytes: dict[bool, int] = field(default_factory=dict)
    has_settled: bool = True  # the last step got hardly more

    @property
    def asked(self) -> frozenset[str]:
        return self.facts.asked or frozenset()

    @property
    def worst_s(self) -> float:
        """Return how long a step may take, by the slowest of the latest ones."""
        return max(self.recent_s, default=self.step_s)

    @property
    def usual_s(self) -> float:
        """Return how long a step takes, by the median of the latest ones."""
        return median(self.recent_s) if self.recent_s else self.step_s

    def times_slower(self, first: Runner) -> float:
        """Return how many times slower it is than the first variant, each by its fastest step."""
        return self.fastest_s / max(first.fastest_s, 1e-9)

    @property
    def device(self) -> torch.device:
        return self.contexts[0].device

    @property
    def precision(self) -> str:
        """Return the lowest precision that the variant multiplies in."""
        plan = together([context.plan for context in self.contexts])
        if plan["precision"].active:
            return str(plan["precision"].value)
        if plan["tf32"].active and plan["tf32"].value != "highest":
            return "bf16" if self.device.type == "cpu" else "tf32"
        return "fp32"

    def applied(self) -> ExitStack:
        """Put the variant in force."""
        with ExitStack() as stack:
            stack.enter_context(self.step.around_blocks())
            for context in self.contexts:
                stack.enter_context(context.in_force())
            stack.enter_context(self.around())
            return stack.pop_all()

    def once(self, rewind: bool = True) -> object:
        """Run one step, on the same data as every other if it is to `rewind`."""
        return interrupts.in_a_window(partial(self._run, rewind))

    @reports_out_of_data
    def _run(self, rewind: bool) -> object:
        if rewind:
            self.step.rewind()
        if self.facts.asked is None:
            return self._first()
        return self._users_step()

    @user_code_boundary
    def _users_step(self) -> object:
        return self.step.run(self.contexts[0])

    @user_code_boundary
    def _first(self) -> object:
        for context in self.contexts:
            context.asked.clear()
        result = self.step.run(self.contexts[0])
        refuse_unrun_result(result)
        asked = frozenset[str]().union(*(context.asked for context in self.contexts))
        self.facts = replace(self.facts, asked=asked)
        return result

    def timed(self) -> float:
        """Return the seconds of one step, from its own state if a later call does less."""
        if self.facts.afresh and self.warm is not None:
            self.warm.restore()
        before, is_kept = heap.fresh_bytes(), heap.is_kept()
        took_s = clock.timed(self.once, self.device)
        fresh = heap.fresh_bytes() - before
        self.fresh_bytes[is_kept] = least = min(fresh, self.fresh_bytes.get(is_kept, fresh))
        # 5 % more, or 4 MiB, take a few hundredths of a long step.
        self.has_settled = fresh <= 1.05 * least + (4 << 20)
        return took_s

    def scale(self) -> float:
        """Return the GradScaler's factor, which falls when a step is skipped; 1 without one."""
        return next((float(scaler.get_scale()) for scaler in self._scalers()), 1.0)

    def observed(self, trace: dict[Key, Look], calls: int = 1, **options: Any) -> ObservedRun:
        """Return the deviations of some calls of the step from the trace; see `Observer`."""
        step, is_lowered = self.step, self.contexts[0].plan["precision"].active
        alone = is_lowered and "autocast" not in self.asked  # which a thread may enter by itself
        others = parameters_of([*step.optimizers, *step.bystanders])
        options |= {"scale": self.scale, "loss_is_scaled": "grad_scaler" in self.asked}
        options |= {"unread": step.unread, "model_names": step.model_names}
        observer = Observer(step.models, others, trace, **options)
        with (
            confinement.refused_elsewhere(step.models) if alone else nullcontext(),
            watching(step.models, observer),
            suppress(Enough),
        ):
            while len(observer.run.ends) < calls and not observer.is_done:
                result = self.once()
                observer.step_ended({"": result} | step.results())
                if self.facts.alone:
                    break
        return observer.run

    def fail(self, error: Exception) -> None:
        self.record.fail(in_a_line(error))
        release(error)

    def begin_afresh(self, repeats: Repeats) -> None:
        """Let each call begin in the warm state from now on: none can follow another."""
        self.facts = replace(self.facts, repeats=repeats)

    def drop_state(self) -> None:
        """Free the copy that rounds start from; another warm-up makes a new one."""
        self.warm = None

    def warm_up(
        self,
        budget: Budget,
        most_s: float,
        interruptions: clock.Interruptions,
        usual_s: float = 0.0,
        watching: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Run steps until two are alike, or for `most_s` seconds; note their cost.

        A step of the baseline takes `usual_s`. Raises StepError if a GradScaler keeps skipping.
        """
        self.warm = self.state() if self.facts.afresh else self.warm
        with watching():
            now, skipped, compiled = self._warm_up_step(budget, interruptions, usual_s)
        first_s, later_s, last, calls = now, 0.0, now, 1
        self.record.note_warm_up(first_s)
        # A guess for the next step: the first one is often the slowest, or compiles.
        expected_s = usual_s if compiled or not usual_s else now
        self.fastest_s = math.inf
        self.recent_s.clear()
        while calls < MOST_OVERFLOWS and budget.allows(expected_s):
            now, skipped, compiled = self._warm_up_step(budget, interruptions, usual_s)
            later_s, calls = later_s + now, calls + 1
            if not compiled:
                self.recent_s.append(now)
                expected_s = self.worst_s
            is_alike = not compiled and (abs(now - last) < 0.2 * last or later_s > most_s)
            if not skipped and (is_alike or calls > MOST_STEPS):
                break
            last = now
        if skipped:
            raise StepError(OVERFLOW if calls >= MOST_OVERFLOWS else "the budget ended in warm-up")
        self.step_s, self.fastest_s = now, min(self.fastest_s, now)
        self.record.note_warm_up(first_s, first_s + later_s - calls * now)

    def _warm_up_step(
        self, budget: Budget, interruptions: clock.Interruptions, usual_s: float
    ) -> tuple[float, bool, bool]:
        graphs, scale = self.record.compilations.graphs, self.scale()
        interruptions.begin()
        with self.record.compilations.counted():
            now = self.timed()
        was_disturbed = interruptions.seconds(now) > SELDOM * now
        if now < self.fastest_s or not self.fastest_s:
            self.fastest_s, self.was_disturbed = now, was_disturbed
        skipped, compiled = self.scale() < scale, self.record.compilations.graphs > graphs
        # Blocks begin with the state after the first step that counts: warm-ups differ in length.
        if self.warm is None and not skipped:
            self.warm = self.state()
        if compiled:
            budget.exclude(now - usual_s)
        for context in self.contexts:
            self.record.notes.update(context.notes)
        return now, skipped, compiled

    def state(self) -> Snapshot:
        """Return a copy of the present state, for blocks to begin with."""
        # If every call begins in it, a scaler that was set back would skip each step.
        return self.step.state(() if self.facts.afresh else self._scalers(), for_timing=True)

    def _scalers(self) -> list[torch.amp.GradScaler]:
        return [one.grad_scaler for one in self.contexts if one.plan["grad_scaler"].active]


def release(error: Exception) -> None:
    """Release the objects that an error's traceback keeps alive, and the memory that they held."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
    gc.collect()
    devices.release_cached()


def compared_runs(
    step: Step,
    start: Snapshot,
    run: Callable[[], object],
    in_force: Callable[[], AbstractContextManager[object]] = nullcontext,
    warm: Snapshot | None = None,
) -> Repeats:
    """Judge by two more calls of a step: from the `warm` or present state, and from `start`."""
    with in_force():
        if warm is not None:
            warm.restore()
        later = _work(step, start, run)
    start.restore()
    with in_force():
        return judged(_work(step, start, run), later)


def _work(step: Step, start: Snapshot, run: Callable[[], object]) -> StepWork:
    """Count a call's work, with the user's random numbers: a step may draw its length."""
    start.restore_randomness()
    with counted(step.models) as work:
        run()
    return work


@dataclass
class Pool:
    """The variants of a step, warmed up once and judged by one trace; all is undone at the end."""

    guard: MeasurementGuard
    runners: dict[str, Runner] = field(default_factory=dict)
    judge: StepJudge = field(default_factory=StepJudge)

    @property
    def facts(self) -> StepFacts:
        """Return the facts of the step, from any variant that ran."""
        known = (one.facts for one in self.runners.values() if one.facts.asked is not None)
        return next(known, UNKNOWN)

    def keep(self, names: Collection[str], at_work: Collection[str]) -> None:
        """Release all others, and the copies of the ones not `at_work`."""
        self.runners = {name: one for name, one in self.runners.items() if name in names}
        for name in self.runners.keys() - at_work:
            self.runners[name].drop_state()


@contextmanager
def pooled(step: Step, copies: int) -> Iterator[Pool]:
    """Yield a pool for `copies` of the state; raise StepError while another step is measured."""
    heap.settle()
    heap.occupy_free_addresses()
    with ExitStack() as stack:
        stack.callback(heap.give_back)
        # Hidden first: settings of a plan in force are no part of the state to come back to.
        stack.enter_context(applying.hidden(*step.models))
        guarded = step.guarded(off_device=are_too_large(step, copies))
        yield Pool(stack.enter_context(guarded))


def are_too_large(step: Step, copies: int) -> bool:
    """Return whether the device has no room for this many copies of the step's state."""
    device = next((parameter.device for parameter in step.models[0].parameters()), None)
    return device is not None and not memory.fits(copies * _copy_bytes(step), device)


def _copy_bytes(step: Step) -> int:
    # Optimizer state that does not exist yet counts as the two tensors that Adam keeps.
    state = memory.size(memory.state_tensors(step.models, step.optimizers))
    parameters = memory.size([p for module in step.models for p in module.parameters()])
    return max(state, 4 * parameters if step.optimizers else 0)
