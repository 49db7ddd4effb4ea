"""Runners of variants, and the pool of runners that the benchmarks of a search share."""

from __future__ import annotations

import gc
import math
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import torch

from speedkit_jupyter.machines import devices
from speedkit_jupyter.plans import applying
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.planning import together
from speedkit_jupyter.right.judge import StepJudge
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.rounds.statistics import SELDOM
from speedkit_jupyter.state.guard import MeasurementGuard
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.step import memory
from speedkit_jupyter.step.step import Step, refuse_unrun_result, reports_out_of_data
from speedkit_jupyter.step.variants import Variant, config_of
from speedkit_jupyter.step.watching import Repeats, StepFacts, counted, judged
from speedkit_jupyter.support.exceptions import StepError, in_a_line
from speedkit_jupyter.support.tracebacks import user_code_boundary
from speedkit_jupyter.torchglue import heap, interrupts

# A step is expected to take as long as the slowest of the last RECENT steps.
RECENT = 8
# Consecutive steps that a GradScaler may skip; each halves the scale, from 2**16 to 2**-14, the
# smallest normal number of fp16.
MOST_OVERFLOWS = 30
OVERFLOW = "the GradScaler skipped every optimizer step: gradients overflow"
# A warm-up ends after this many steps, even if consecutive steps still differ.
MOST_STEPS = 12
# Share of the budget for the warm-up steps of all variants, if consecutive steps differ.
WARM_UP = 0.05
# Of code that joins results of autocast with other tensors, as a static cache of keys and values.
MIXED = "; this code needs one dtype, and autocast gives several: model.to(torch.bfloat16) has one"


@dataclass
class Runner:
    """Runs a variant: a context for each model, and the state at the start of each round."""

    step: Step
    contexts: list[SpeedContext]
    record: Record
    facts: StepFacts = field(default_factory=StepFacts)
    warm: Snapshot | None = field(default=None, repr=False)
    step_s: float = 0.0  # approximate seconds of a step
    fastest_s: float = 0.0  # in the warm-up; the next field tells if that step was disturbed:
    was_disturbed: bool = False
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT), repr=False)
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    # Fewest bytes that a step requested from the system, with the heap kept and not kept.
    fresh_bytes: dict[bool, int] = field(default_factory=dict)
    has_settled: bool = True  # True if the last step requested hardly more

    @property
    def worst_s(self) -> float:
        """Return the seconds of the slowest recent step."""
        return max(self.recent_s, default=self.step_s)

    @property
    def usual_s(self) -> float:
        """Return the median seconds of recent steps."""
        return median(self.recent_s) if self.recent_s else self.step_s

    def times_slower(self, first: Runner) -> float:
        """Return the time of the fastest step ÷ the time of the first variant's fastest step."""
        return self.fastest_s / max(first.fastest_s, 1e-9)

    @property
    def device(self) -> torch.device:
        return self.contexts[0].device

    @property
    def precision(self) -> str:
        """Return the lowest precision of the variant's products."""
        plan = together([context.plan for context in self.contexts])
        if plan["precision"].active:
            return str(plan["precision"].value)
        if plan["tf32"].active and plan["tf32"].value != "highest":
            return "bf16" if self.device.type == "cpu" else "tf32"
        return "fp32"

    def applied(self) -> ExitStack:
        with ExitStack() as stack:
            stack.enter_context(self.step.around_blocks())
            for context in self.contexts:
                stack.enter_context(context.in_force())
            stack.enter_context(self.around())
            return stack.pop_all()

    def once(self, rewind: bool = True) -> object:
        """Run one step; with `rewind`, on the same data as every other step."""
        return interrupts.in_a_window(partial(self._run, rewind))

    @user_code_boundary
    @reports_out_of_data
    def _run(self, rewind: bool) -> object:
        if rewind:
            self.step.rewind()
        is_first = self.facts.asked is None
        for context in self.contexts if is_first else ():
            context.asked.clear()
        result = self.step.run(self.contexts[0])
        if is_first:
            refuse_unrun_result(result)
            asked = frozenset[str]().union(*(context.asked for context in self.contexts))
            self.facts = replace(self.facts, asked=asked)
        return result

    def timed(self) -> float:
        """Return the seconds of one step, from the warm state if later calls do less work."""
        if self.facts.repeats.afresh and self.warm is not None:
            self.warm.restore()
        before, is_kept = heap.fresh_bytes(), heap.is_kept()
        took_s = clock.timed(self.once, self.device)
        fresh = heap.fresh_bytes() - before
        self.fresh_bytes[is_kept] = least = min(fresh, self.fresh_bytes.get(is_kept, fresh))
        # 5 % more, or 4 MiB, cost a few percent of a long step.
        self.has_settled = fresh <= 1.05 * least + (4 << 20)
        return took_s

    def scale(self) -> float:
        """Return the GradScaler's scale, which decreases when a step is skipped; 1 without one."""
        return next((float(scaler.get_scale()) for scaler in self._scalers()), 1.0)

    def measure_memory(self) -> None:
        """Record the allocator's peak in one step from the warm state."""
        assert self.warm is not None
        with self.applied():
            self.warm.restore()
            state = memory.state_tensors(self.step.models, self.step.optimizers)
            try:
                self.record.memory = memory.needed(self.once, self.device, state)
            except Exception as error:
                self.fail(error)

    def fail(self, error: Exception) -> None:
        text, is_lowered = in_a_line(error), self.precision == "bf16"
        is_mixed = is_lowered and isinstance(error, RuntimeError) and "dtype" in text
        self.record.fail(text + MIXED * is_mixed)
        release(error)

    def begin_afresh(self, repeats: Repeats) -> None:
        """Start each call from the warm state from now on, because calls can't be repeated."""
        self.facts = replace(self.facts, repeats=repeats)

    def drop_state(self) -> None:
        """Free the state copy for rounds; another warm-up creates a new one."""
        self.warm = None

    def warm_up(
        self,
        budget: Budget,
        interruptions: clock.Interruptions,
        variants: int,
        usual_s: float = 0.0,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Run steps until two take equally long, or this variant's share of time is spent.

        A step of the baseline takes `usual_s`. Raises StepError if a GradScaler skips every step.
        """
        most_s = WARM_UP * budget.seconds / variants
        self.warm = self.state() if self.facts.repeats.afresh else self.warm
        with around():
            now, skipped, compiled = self._warm_up_step(budget, interruptions, usual_s)
        first_s, later_s, last, calls = now, 0.0, now, 1
        self.record.note_warm_up(first_s)
        # An estimate for the next step, because the first is often the slowest, or compiles.
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
        # Blocks start from the state after the first counted step: warm-ups differ in length.
        if self.warm is None and not skipped:
            self.warm = self.state()
        if compiled:
            budget.exclude(now - usual_s)
        for context in self.contexts:
            self.record.notes.update(context.notes)
        return now, skipped, compiled

    def state(self) -> Snapshot:
        """Return a copy of the current state, for the start of blocks."""
        # If every call starts from it, a restored scaler would skip each step.
        scalers = [] if self.facts.repeats.afresh else self._scalers()
        return self.step.state(scalers, for_timing=True)

    def _scalers(self) -> list[torch.amp.GradScaler]:
        return [one.grad_scaler for one in self.contexts if one.plan["grad_scaler"].active]


def release(error: Exception) -> None:
    """Release the objects that an error's traceback keeps alive, and their memory."""
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
    """Compare the work of two calls: from the `warm` or current state, and from `start`."""
    with in_force():
        if warm is not None:
            warm.restore()
        start.restore_randomness()  # the user's generators, because a step may draw its length
        with counted(step.models) as later:
            run()
    start.restore()
    with in_force():
        start.restore_randomness()
        with counted(step.models) as first:
            run()
    return judged(first, later)


@dataclass
class Pool:
    """The warm runners of a step, judged by one trace; the user's state is restored at the end."""

    guard: MeasurementGuard
    runners: dict[str, Runner] = field(default_factory=dict)
    judge: StepJudge = field(default_factory=StepJudge)

    def runner(self, step: Step, variant: Variant, first: Runner | None = None) -> Runner:
        """Return the runner of a known variant with a new record, or of a new variant.

        A new variant is planned by the facts of the `first`. A plan without changes is the
        baseline; a declined plan is not a variant.
        """
        if (known := self.runners.get(variant.name)) is not None:
            return replace(known, record=known.record.anew())
        facts = StepFacts() if first is None else first.facts
        configs = [config_of(variant, model) for model in step.models]
        contexts = [
            applying.prepare(model, config, step.holders(model), facts.made)
            for model, config in zip(step.models, configs, strict=True)
        ]
        plan = together([context.plan for context in contexts])
        applied = {d.name: d.value for d in plan if d.active}
        declines = {d.name: d.reason for d in plan if d.declined}
        is_planned = first is not None and any(config is not None for config in configs)
        is_empty = is_planned and not applied
        reasons = (f"{name} declined: {reason}" for name, reason in declines.items() if is_empty)
        record = Record(
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

    def add(self, runners: Sequence[Runner]) -> None:
        self.runners |= {runner.record.name: runner for runner in runners}

    def keep(self, names: Collection[str], at_work: Collection[str]) -> None:
        """Release runners not in `names`, and state copies of runners not in `at_work`."""
        self.runners = {name: one for name, one in self.runners.items() if name in names}
        for name in self.runners.keys() - at_work:
            self.runners[name].drop_state()


@contextmanager
def pooled(step: Step, copies: int) -> Iterator[Pool]:
    """Yield a pool with room for `copies` of the state. Raises StepError during a measurement."""
    heap.settle()
    heap.occupy_free_addresses()
    with ExitStack() as stack:
        stack.callback(heap.give_back)
        # Plans are hidden first, because their settings are not part of the user's state.
        stack.enter_context(applying.hidden(*step.models))
        off_device = not _has_room(step, copies)
        yield Pool(stack.enter_context(step.guarded(off_device=off_device)))


def _has_room(step: Step, copies: int) -> bool:
    parameters = [parameter for module in step.models for parameter in module.parameters()]
    state_bytes = memory.size(memory.state_tensors(step.models, step.optimizers))
    if step.optimizers:  # missing optimizer state counts as Adam's two tensors
        state_bytes = max(state_bytes, 4 * memory.size(parameters))
    return not parameters or memory.fits(copies * state_bytes, parameters[0].device)
