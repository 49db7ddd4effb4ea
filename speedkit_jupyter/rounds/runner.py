"""One variant at work."""

from __future__ import annotations

import gc
import math
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from speedkit_jupyter.machines import devices
from speedkit_jupyter.plans import applying
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.planning import together
from speedkit_jupyter.right.observer import Enough, Key, Look, ObservedRun, Observer
from speedkit_jupyter.right.reference import parameters_of
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.step.repeats import UNKNOWN, Repeats, StepFacts, StepWork, counted, judged
from speedkit_jupyter.step.routing import Router
from speedkit_jupyter.step.step import Step, refuse_unrun_result, reports_out_of_data
from speedkit_jupyter.step.watching import watching
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.support.tracebacks import user_code_boundary
from speedkit_jupyter.torchglue import confinement, heap, interrupts

# Entries of a plan that reach the step's code by routing, next to flags, model and optimizers.
ROUTED, ROUTED_BY = ("precision", "grad_scaler"), ("autocast", "grad_scaler")
# The plan of a variant that changes the optimizer's step alone.
STEPS = {"fused_optimizer"}
# The heap has settled in a step that gets at most this share more memory anew than another one.
SETTLED_SHARE = 0.05
# A step, or a block of steps, is expected to take as long as the slowest of the last RECENT.
RECENT = 8
# Steps in a row that a GradScaler may skip, which halves its factor each time: from 2**16 to
# 2**-14, the smallest normal number of fp16.
MOST_OVERFLOWS = 30


@dataclass
class Runner:
    """One variant at work: a context for each model, and the state that its rounds start from.

    `step_s` is about how long its step takes; `recent_s` took the latest ones, `fastest_s` the
    fastest of the warm-up, which other processes may have disturbed (`was_disturbed`). Each got
    `fresh_bytes` from the system at least, by whether the heap is kept; the last one `has_settled`
    if it got hardly more. `facts` are known from the first call of the step on. `around` makes what
    is in force in addition to the plan. One that `is_planned` has a config; one that is not
    `is_routed` gets of its plan only what the step asks its context for.
    """

    step: Step
    contexts: list[SpeedContext]
    record: Record
    facts: StepFacts = UNKNOWN
    warm: Snapshot | None = field(default=None, repr=False)
    step_s: float = 0.0
    fastest_s: float = 0.0
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT), repr=False)
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    was_disturbed: bool = False
    fresh_bytes: dict[bool, int] = field(default_factory=dict)
    has_settled: bool = True
    is_planned: bool = False
    is_routed: bool = True
    _router: Router | None = None

    @property
    def asked(self) -> frozenset[str]:
        """Return the parts of a plan that the step asks its context for, as far as it ran."""
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
        """Return the device of the first model under this plan."""
        return self.contexts[0].device

    def applied(self) -> ExitStack:
        """Put the variant in force; parts that the step doesn't ask its context for are routed."""
        with ExitStack() as stack:
            stack.enter_context(self.step.around_blocks())
            for context in self.contexts:
                stack.enter_context(context.in_force())
            stack.enter_context(self.around())
            is_active = any(one.plan[name].active for one in self.contexts for name in ROUTED)
            if self.facts.asked is None and is_active:
                self.once()
            asked = self.asked if self.is_routed else ROUTED_BY
            self._router = Router(self.contexts, self.step.optimizers, asked)
            self._note_what_does_not_act()
            stack.enter_context(self._router.installed())
            return stack.pop_all()

    def once(self, rewind: bool = True) -> object:
        """Run one step, on the same data as every other if it is to `rewind`."""
        return interrupts.in_a_window(partial(self._run, rewind))

    @reports_out_of_data
    def _run(self, rewind: bool) -> object:
        if rewind:
            self.step.rewind()
        if self.facts.asked is None or self._router is None:
            return self._first()
        return self._router.run(partial(self.step.run, self.contexts[0]))

    def timed(self) -> float:
        """Return the seconds of one step, from its own state if a later call does less."""
        if self.facts.afresh and self.warm is not None:
            self.warm.restore()
        before, is_kept = heap.fresh_bytes(), heap.is_kept()
        took_s = clock.timed(self.once, self.device)
        fresh = heap.fresh_bytes() - before
        self.fresh_bytes[is_kept] = least = min(fresh, self.fresh_bytes.get(is_kept, fresh))
        # 4 MiB more take a few hundredths of a long step.
        self.has_settled = fresh <= (1 + SETTLED_SHARE) * least + (4 << 20)
        return took_s

    @user_code_boundary
    def _first(self) -> object:
        """Run the first step of all, and note what its code asks a context for."""
        for context in self.contexts:
            context.asked.clear()
        result = self.step.run(self.contexts[0])
        refuse_unrun_result(result)
        asked = frozenset[str]().union(*(context.asked for context in self.contexts))
        self.facts = replace(self.facts, asked=asked)
        return result

    def _note_what_does_not_act(self) -> None:
        """Take a precision from the record that an unrouted step does not ask for."""
        precision = self.record.applied.get("precision")
        if self.is_routed or precision is None or "autocast" in self.asked:
            return
        self.record.notes["precision"] = applying.not_entered(precision)
        for name in ROUTED:
            self.record.applied.pop(name, None)
            self.record.plan.pop(name, None)

    def scale(self) -> float:
        """Return the GradScaler's factor, which falls when a step is skipped; 1 without one."""
        return next((float(scaler.get_scale()) for scaler in self._scalers()), 1.0)

    def observed(
        self, trace: dict[Key, Look], check: Sequence[str] = (), calls: int = 1, **options: Any
    ) -> ObservedRun:
        """Return how far some calls of the step are off the trace; see `Observer`.

        The values of the names `check` are compared in place of all outputs.
        """
        step, routed = self.step, self._router is not None and self._router.lowers
        others = parameters_of([*step.optimizers, *step.bystanders])
        options |= {"scale": self.scale, "loss_is_scaled": "grad_scaler" in self.asked}
        options |= {"named": bool(check), "unread": step.unread, "model_names": step.model_names}
        observer = Observer(step.models, others, trace, **options)
        with (
            confinement.refused_elsewhere(step.models) if routed else nullcontext(),
            watching(step.models, observer),
            suppress(Enough),
        ):
            while len(observer.run.ends) < calls and not observer.is_done:
                result = self.once()
                observer.step_ended(step.values(check) or {"": result} | step.results())
                if self.facts.alone:
                    break
        return observer.run

    @property
    def precision(self) -> str:
        """Return the lowest precision that the variant multiplies in."""
        plan = together([context.plan for context in self.contexts])
        if plan["precision"].active and (self.is_routed or "autocast" in self.asked):
            return str(plan["precision"].value)
        if plan["tf32"].active and plan["tf32"].value != "highest":
            return "bf16" if self.device.type == "cpu" else "tf32"
        return "fp32"

    @property
    def steps_only(self) -> bool:
        """Return whether the variant changes the optimizer's step alone."""
        return {d.name for one in self.contexts for d in one.plan if d.active} == STEPS

    def fail(self, error: Exception) -> None:
        """Note the error in a line, and release the objects that its traceback keeps alive."""
        self.record.fail(in_a_line(error))
        release(error)

    def begin_afresh(self, repeats: Repeats) -> None:
        """Let each call begin in the warm state from now on: none can follow another."""
        self.facts = replace(self.facts, repeats=repeats)

    def keep_state(self) -> None:
        """Let rounds start from the state as it is now."""
        self.warm = self.state()

    def drop_state(self) -> None:
        """Free the copy that rounds start from; another warm-up makes a new one."""
        self.warm = None

    def forget_times(self) -> None:
        """Forget the steps so far, of which the first one may have compiled."""
        self.fastest_s = math.inf
        self.recent_s.clear()

    def note_step(self, seconds: float, was_disturbed: bool) -> None:
        """Note a step of the warm-up, if it is the fastest so far."""
        if seconds < self.fastest_s or not self.fastest_s:
            self.fastest_s, self.was_disturbed = seconds, was_disturbed

    def end_warm_up(self, step_s: float) -> None:
        """Expect steps of these seconds, as long as the last one took."""
        self.step_s, self.fastest_s = step_s, min(self.fastest_s, step_s)

    def restarted(self, start: Snapshot) -> float:
        """Let each call begin in the state `start` under this plan; return the seconds of one."""
        start.restore()  # before the plan is applied: settings are part of the state
        with self.applied():
            self.keep_state()
            self.step_s = self.fastest_s = self.timed()
        self.recent_s.clear()
        self.recent_s.append(self.step_s)
        return self.step_s

    def state(self) -> Snapshot:
        """Return a copy of the present state, with its scalers, for blocks to begin with.

        If every call begins in it, without them: a scaler that was set back would skip each step.
        """
        return self.step.state(() if self.facts.afresh else self._scalers(), for_timing=True)

    def _scalers(self) -> list[torch.amp.GradScaler]:
        return [one.grad_scaler for one in self.contexts if one.plan["grad_scaler"].active]


def release(error: Exception) -> None:
    """Release the objects that an error's traceback keeps alive, and the memory that they held."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
    gc.collect()
    devices.release_cached()


def compared_calls(runner: Runner, start: Snapshot) -> Repeats:
    """Judge by two more calls of a warm variant whether a later one does less."""
    return compared_runs(runner.step, start, runner.once, runner.applied, runner.warm)


def compared_runs(
    step: Step,
    start: Snapshot,
    run: Callable[[], object],
    in_force: Callable[[], AbstractContextManager[object]] = nullcontext,
    warm: Snapshot | None = None,
) -> Repeats:
    """Judge by two more calls of a step that ran: from the present state, or the `warm` one."""
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
