"""Measures a step with batches of many sizes, then everything is put back."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.batching.batch_sizes import BatchSizes, Size
from speedkit_jupyter.batching.feeds import Feed
from speedkit_jupyter.batching.received import (
    free_bytes,
    grows,
    is_out_of_memory,
    let_go,
    operations,
    received,
)
from speedkit_jupyter.measure.checks import memory
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.budget import Budget
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.subject.step import OUT_OF_DATA, Step
from speedkit_jupyter.measure.undo.snapshot import Snapshot
from speedkit_jupyter.plans.applying import in_force_or_none
from speedkit_jupyter.support.arguments import seconds
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.tracebacks import door

if TYPE_CHECKING:
    import torch

DEFAULT_S = 20.0
# A size is left out where its first CALLS would take more than this share of the budget; a block
# lasts BLOCK_S, and ENOUGH rounds are enough. After a size that does not fit, HALVED between it and
# the last that did are tried.
LONGEST, CALLS, BLOCK_S, ENOUGH, HALVED = 0.2, 4, 0.02, 25, 3
# A call that takes longer needs no other one before it.
LEAD_S = 0.2
# This share of the free memory stays free; nothing is said of batches beyond FAR times the largest
# that ran.
MARGIN, FAR = 0.1, 16
NOT_RESIZED = (
    "(with a batch of {number}, made of the {now} samples that there are: what counts or points to "
    "samples within a batch can't be resized, nor can a part of it alone)"
)
OUT = "out of memory: everything was put back"
TOO_LARGE = "would not fit, by what smaller ones take"
TOO_LONG = "was not tried: it takes too long for the budget (--budget)"
SAME_BATCH = (
    "the model was not seen to receive it: the step takes its own part of the data (torch.randint, "
    "a slice). Give a function that takes its batch as an argument"
)


class Sweep:
    """Drain `run()`, then read `result()`.

    Sizes are doubled from the first to the last of `sizes`, as long as they fit and the budget
    allows. Whatever happens, models, optimizers, random generators and names end as they began,
    after an error for want of memory too. Raises StepError where the step can't be measured.
    """

    def __init__(
        self,
        step: Step,
        feed: Callable[[], Feed],
        device: torch.device,
        found: BatchSizes,
        sizes: tuple[int, int],
        budget_s: float | None = None,
    ) -> None:
        self.step, self._make_feed, self._device, self._found = step, feed, device, found
        self._least, self._most = sizes
        self.budget_s = seconds("budget_s", budget_s) or DEFAULT_S
        self.begun_s: float | None = None

    def result(self) -> BatchSizes:
        """Return what is known so far."""
        return self._found

    def has_results(self) -> bool:
        """Return whether there is anything to show already."""
        return bool(self._found.measured)

    def run(self) -> Generator[Progress, None, None]:
        """Measure; yields after every size. What the step changed is put back at the end."""
        __tracebackhide__ = True
        budget = Budget(self.budget_s, begun_s=self.begun_s)
        with self.step.guarded() as visit:
            self._context: Any = in_force_or_none(self.step.models)
            budget.reserved_s = visit.taking_s
            self._feed = self._make_feed()
            self._found.now, self._found.source = self._feed.now, self._feed.source
            yield Progress(0.0, f"batches of {self._feed.now}")
            self._warm_up(visit.state)
            yield from self._upwards(visit.state, budget)
            yield from self._rounds(visit.state, budget)

    def _warm_up(self, state: Snapshot) -> None:
        """Call the step as the user does, whose errors are the user's."""
        __tracebackhide__ = True
        with self._feed.of(self._feed.now) as samples:
            self._count = received if received(self._call) else operations
            if not samples():
                raise StepError("the step never goes through this loader")
        state.restore()

    def _upwards(self, state: Snapshot, budget: Budget) -> Generator[Progress, None, None]:
        """Try each size once, from the smallest: memory, and about how long it takes."""
        __tracebackhide__ = True
        found = self._found
        held = memory.size(memory.state_tensors(self.step.models, self.step.optimizers))
        free = free_bytes(self._device)
        found.available_bytes = None if free is None else free + held
        number = self._least
        while number <= self._most:
            size = self._tried(number, state, budget)
            if size.why_not:
                break
            yield Progress(budget.share, f"batches of {number}")
            number = min(number * 2, self._most) if number < self._most else number + 1
        for _ in range(HALVED if size.why_not == OUT and found.measured else 0):
            least = min(one.number for one in found.sizes if one.why_not == OUT)
            number = (max(one.number for one in found.measured) + least) // 2
            if number in {one.number for one in found.sizes}:
                break
            self._tried(number, state, budget)
            yield Progress(budget.share, f"batches of {number}")
        if not found.measured:
            raise StepError(f"a batch of {self._least} was not measured: {size.why_not}")
        found.largest = self._largest()

    def _tried(self, number: int, state: Snapshot, budget: Budget) -> Size:
        """Measure a size, or say why not."""
        __tracebackhide__ = True
        size, line, available = Size(number), self._line(), self._found.available_bytes
        takes_s = self._would_take_s(number)
        if line and available is not None and line[0] + line[1] * number > (1 - MARGIN) * available:
            size.why_not = TOO_LARGE
        elif takes_s and (takes_s > LONGEST * self.budget_s or not budget.allows(takes_s)):
            size.why_not = TOO_LONG
        else:
            self._first(size, state)
        self._found.sizes.append(size)
        self._found.sizes.sort(key=lambda one: one.number)
        return size

    def _first(self, size: Size, state: Snapshot) -> None:
        """Measure what its model receives, its memory, and a first time."""
        __tracebackhide__ = True
        try:
            with self._feed.of(size.number) as samples:
                size.received = self._count(self._call)
                size.samples = samples()
                if not self._grows(size):
                    size.why_not = SAME_BATCH
                    return
                tensors = memory.state_tensors(self.step.models, self.step.optimizers)
                size.peak_bytes = memory.needed(self._call, self._device, tensors).peak_bytes
                size.first_s = min(self._timed() for _ in range(2))
        except Exception as error:
            if not is_out_of_memory(error):
                error.add_note(NOT_RESIZED.format(number=size.number, now=self._feed.now))
                raise
            size.why_not, size.first_s = OUT, 0.0
            let_go(error)
        finally:
            state.restore()

    def _grows(self, size: Size) -> bool:
        """Return whether the model received more than of the size before; for the first size, less
        than of the next.
        """
        __tracebackhide__ = True
        smaller = [one for one in self._found.measured if one.number < size.number]
        other = smaller[-1] if smaller else Size(2 * size.number)
        if not smaller:
            with self._feed.of(other.number):
                other.received = self._count(self._call)
        return grows(size.received / max(other.received, 1), size.number / other.number)

    def _rounds(self, state: Snapshot, budget: Budget) -> Generator[Progress, None, None]:
        """Time all that ran, in shuffled rounds."""
        __tracebackhide__ = True
        order, shuffled = self._found.measured, random.Random(0)
        longest_s = sum(max(2 * size.first_s, BLOCK_S) for size in order)
        for number in range(ENOUGH):
            if number and not budget.allows(longest_s):
                break
            begun_s = clock.now()
            shuffled.shuffle(order)
            for size in order:
                self._time(size, state)
                yield Progress(max(budget.share, number / ENOUGH), f"round {number + 1}")
            longest_s = clock.now() - begun_s

    def _time(self, size: Size, state: Snapshot) -> None:
        """Time a block of calls, after one that is not timed where calls are short."""
        __tracebackhide__ = True
        calls = max(1, math.ceil(BLOCK_S / size.first_s))
        with self._feed.of(size.number):
            if size.first_s < LEAD_S:
                self._call()
            size.times_s.append(sum(self._timed() for _ in range(calls)) / calls)
        state.restore()

    def _timed(self) -> float:
        __tracebackhide__ = True
        return clock.timed(self._call, self._device)

    @door
    def _call(self) -> None:
        __tracebackhide__ = True
        with self.step.around_blocks():
            try:
                self.step.run(self._context)
            except StopIteration:  # would look like the end of a generator of ours
                raise StepError(OUT_OF_DATA) from None

    def _line(self) -> tuple[float, float] | None:
        """Return the bytes of no sample, and of each: through the last two sizes."""
        known = [(one.number, one.peak_bytes) for one in self._found.measured if one.peak_bytes]
        if len(known) < 2:
            return None
        (number, peak_bytes), (other, other_bytes) = known[-2:]
        each = (other_bytes - peak_bytes) / (other - number)
        return other_bytes - each * other, each + self._feed.sample_bytes

    def _would_take_s(self, number: int) -> float:
        """Return about the seconds of its first calls, by the smaller size that says the least."""
        each = (size.first_s / size.number for size in self._found.measured)
        return CALLS * number * min(each, default=0.0)

    def _largest(self) -> int | None:
        """Return the largest that fits, by the growth of memory; no larger than what failed, nor
        than can be told from those that ran: another part of the step may be the fullest later.
        """
        line, ran = self._line(), max(size.number for size in self._found.measured)
        available = self._found.available_bytes
        if any(size.why_not == OUT for size in self._found.sizes):
            return ran
        if line is None or available is None or line[1] <= 0:
            return None
        fits = math.floor(((1 - MARGIN) * available - line[0]) / line[1])
        return max(min(fits, FAR * ran), ran)
