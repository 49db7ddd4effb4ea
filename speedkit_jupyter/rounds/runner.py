"""Run one variant: apply its plan, warm it up, time its steps, record its failures."""

from __future__ import annotations

import gc
import math
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import torch

from speedkit_jupyter.machines import devices
from speedkit_jupyter.plans.context import MeasuredContext
from speedkit_jupyter.plans.planning import precision_of, together
from speedkit_jupyter.right.judge import Accuracy
from speedkit_jupyter.rounds import busy_machine, clock
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.comparison import Record
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.step.step import Step, refuse_unrun_result, reports_out_of_data
from speedkit_jupyter.step.watching import StepFacts
from speedkit_jupyter.support import units
from speedkit_jupyter.support.exceptions import StepError, in_a_line
from speedkit_jupyter.support.tracebacks import user_code_boundary
from speedkit_jupyter.torchglue import heap, interrupts

# A step or block is expected to take as long as the slowest of the last RECENT steps or blocks.
RECENT = 8
# Consecutive steps that a GradScaler may skip; each halves the scale, from 2**16 to 2**-14, the
# smallest normal number of fp16.
MOST_OVERFLOWS = 30
OVERFLOW = "the GradScaler skipped every optimizer step: gradients overflow"
# A warm-up with more steps than this ends, even if consecutive steps still differ.
MOST_STEPS = 12
# Hint if code can't combine autocast's results with other tensors, such as a static KV cache.
MIXED = "; this code needs one dtype, and autocast gives several: model.to(torch.bfloat16) has one"
# If time is short, variants that are this many times slower in warm-up are left out first.
LEFT_OUT_FIRST = 2.0
# A function that returns a context manager; steps run inside its block.
Surrounding = Callable[[], AbstractContextManager[object]]


@dataclass
class Runner:
    """Run one variant of a step; `contexts` has one context for each model."""

    step: Step
    contexts: list[MeasuredContext]
    record: Record
    facts: StepFacts = field(default_factory=StepFacts)
    warm: Snapshot | None = field(default=None, repr=False)  # the blocks' initial state, if warm
    step_s: float = 0.0  # approximate seconds of a step
    fastest_s: float = 0.0  # fastest warm-up step, without the first if there are several
    was_disturbed: bool = False  # True if other processes may have delayed the fastest step
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT), repr=False)
    around: Surrounding = nullcontext
    proof: Callable[[Callable[[], None]], Accuracy] | None = None  # see `Variant`
    # Fewest bytes that a step requested from the system; the key is True if freed memory was kept.
    fresh_bytes: dict[bool, int] = field(default_factory=dict)
    has_settled: bool = True  # True if the last step requested nearly the fewest bytes

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
        """Return the lowest precision that the plan gives matrix products; fp32 by default."""
        return precision_of(together([context.plan for context in self.contexts]))

    def applied(self) -> ExitStack:
        """Enter the context managers of step, plan and variant; the returned stack exits them."""
        with ExitStack() as stack:
            stack.enter_context(self.step.around_blocks())
            for context in self.contexts:
                stack.enter_context(context.in_force())
            stack.enter_context(self.around())
            return stack.pop_all()

    @user_code_boundary
    @reports_out_of_data
    def once(self, rewind: bool = True) -> object:
        """Run one step and return its result; with `rewind`, on the same data as every other step.

        The first call sets `facts.asked`. Raises StepError if the result is awaitable or data ends.
        """
        if rewind:
            self.step.rewind()
        is_first = self.facts.asked is None
        for context in self.contexts if is_first else ():
            context.asked.clear()
        result = interrupts.in_a_window(partial(self.step.run, self.contexts[0]))
        if is_first:
            refuse_unrun_result(result)
            asked = frozenset[str]().union(*(context.asked for context in self.contexts))
            self.facts = replace(self.facts, asked=asked)
        return result

    def timed(self) -> float:
        """Time a step, set `has_settled`, return the seconds; first restore `warm` if necessary."""
        if self.facts.repeats.afresh and self.warm is not None:
            self.warm.restore()
        before, is_kept = heap.fresh_bytes(), heap.is_kept()
        took_s = clock.timed(self.once, self.device)
        fresh = heap.fresh_bytes() - before
        self.fresh_bytes[is_kept] = least = min(fresh, self.fresh_bytes.get(is_kept, fresh))
        # Requesting 5 % + 4 MiB more than the fewest bytes lengthens a long step by a few percent.
        self.has_settled = fresh <= 1.05 * least + (4 << 20)
        return took_s

    def scale(self) -> float:
        """Return the GradScaler's scale, which decreases at a skipped step; 1 without a scaler."""
        return next((float(scaler.get_scale()) for scaler in self._scalers()), 1.0)

    def fail(self, error: Exception) -> None:
        """Record the error as the variant's failure; release objects that the error keeps alive."""
        text, is_lowered = in_a_line(error), self.precision == "bf16"
        is_mixed = is_lowered and isinstance(error, RuntimeError) and "dtype" in text
        self.record.fail(text + MIXED * is_mixed)
        release(error)

    def leave_out(self, first: Runner, budget: Budget) -> None:
        """Stop timing this variant; record why: a busy machine, low speed, or lack of time."""
        given = f"{units.seconds(budget.seconds)} are"
        if budget.within is not None:  # users don't know the parts of a search's budget
            given = "the rest of the budget is"
        told = f"{given} too short for this many variants of it"
        if self.was_disturbed:
            told = f"the machine was busy; {given} too short to time it"
        elif self.times_slower(first) > LEFT_OUT_FIRST:
            told = f"{self.far_slower(first)}; {given} too short to time it"
        self.record.notes["left out"] = told
        self.warm = None

    def far_slower(self, first: Runner) -> str:
        """Return a text that says how many times slower than `first` the variant is."""
        times = self.times_slower(first)
        return f"far slower than {first.record.name}: {times:.1f} times in its fastest step"

    def warm_up(
        self,
        budget: Budget,
        interruptions: busy_machine.Interruptions,
        most_s: float,
        usual_s: float = 0.0,
        around: Surrounding = nullcontext,
    ) -> None:
        """Run steps until consecutive times differ by under 20 %; set `warm` and `step_s`.

        The warm-up also ends with the budget, after more than MOST_STEPS steps, or if the steps
        after the first took over `most_s` seconds. The first step runs inside `around()`. `usual_s`
        is the baseline's time per step. Raises StepError if the GradScaler skipped the last step.
        """
        record, times_s, expected_s, skipped = self.record, list[float](), usual_s, False
        self.warm = self.state() if self.facts.repeats.afresh else self.warm
        self.recent_s.clear()
        while not times_s or (len(times_s) < MOST_OVERFLOWS and budget.allows(expected_s)):
            graphs, scale = record.compilations.graphs, self.scale()
            interruptions.begin()
            with nullcontext() if times_s else around(), record.compilations.counted():
                times_s.append(now_s := self.timed())
            waited_s = interruptions.seconds(now_s)
            skipped, compiled = self.scale() < scale, record.compilations.graphs > graphs
            # Warm-ups differ in length: blocks start from the state after the first unskipped step.
            if self.warm is None and not skipped:
                self.warm = self.state()
            budget.exclude(now_s - usual_s if compiled else 0.0)
            if len(times_s) <= 2 or now_s < self.fastest_s:  # the first step is often the slowest
                self.fastest_s, self.was_disturbed = now_s, waited_s > busy_machine.SELDOM * now_s
            if len(times_s) == 1:
                record.note_warm_up(now_s)
            elif not compiled:
                self.recent_s.append(now_s)
            record.notes.update({k: v for one in self.contexts for k, v in one.notes.items()})
            if self.recent_s or (usual_s and not compiled):  # the first step often compiles
                expected_s = max(self.recent_s, default=now_s)
            if not skipped and _is_settled(times_s, compiled, most_s):
                break
        if skipped:
            is_all = len(times_s) >= MOST_OVERFLOWS
            raise StepError(OVERFLOW if is_all else "the budget ended in warm-up")
        self.step_s = times_s[-1]
        record.note_warm_up(times_s[0], sum(times_s) - len(times_s) * self.step_s)

    def state(self) -> Snapshot:
        """Return a copy of the current state, from which blocks can start."""
        # If every call starts from the copy, a restored scaler might skip every step.
        scalers = [] if self.facts.repeats.afresh else self._scalers()
        return self.step.state(scalers, for_timing=True)

    def _scalers(self) -> list[torch.amp.GradScaler]:
        return [one.grad_scaler for one in self.contexts if one.plan["grad_scaler"].active]


def _is_settled(times_s: Sequence[float], compiled: bool, most_s: float) -> bool:
    """Return whether the warm-up can end: after two similar steps, or enough steps or seconds."""
    last_s, now_s = times_s[-2:] if len(times_s) > 1 else (0.0, math.inf)
    is_alike = abs(now_s - last_s) < 0.2 * last_s or sum(times_s[1:]) > most_s
    return len(times_s) > MOST_STEPS or (is_alike and not compiled)


def release(error: Exception) -> None:
    """Release the objects that an error's traceback keeps alive, and cached device memory."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
    gc.collect()
    devices.release_cached()
