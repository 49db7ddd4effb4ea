"""Measures a step with batches of many sizes, then everything is put back."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.batching.available import MARGIN, free_bytes, is_out_of_memory, let_go
from speedkit_jupyter.batching.batch_sizes import BatchSizes, Size
from speedkit_jupyter.batching.feeds import Feed
from speedkit_jupyter.batching.received import grows, operations, received
from speedkit_jupyter.measure.checks import memory
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.budget import Budget
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.subject.step import OUT_OF_DATA, Step
from speedkit_jupyter.measure.undo.isolation import State
from speedkit_jupyter.plans.applying import in_force_or_none
from speedkit_jupyter.profiling.counters import Counters
from speedkit_jupyter.support.arguments import seconds
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.tracebacks import door

if TYPE_CHECKING:
    import torch

DEFAULT_S = 20.0
# A size is left out where its first calls would take more than this share of the budget; a block
# lasts so long, and so many rounds are enough. After one that does not fit so many
# between are tried.
LONGEST, BLOCK_S, ENOUGH, HALVED = 0.2, 0.02, 25, 3
# Of each size: what its model receives, its memory, and two times.
CALLS = 4
# A call that takes longer needs no other one before it.
LEAD_S = 0.2
NOT_RESIZED = (
    "(with a batch of {number}, made of the {now} samples that there are: what counts or points to "
    "samples within a batch can't be resized, nor can a part of it alone)"
)
# Nothing is said of batches that are more than so many times the largest that ran.
FAR = 16
OUT = "out of memory: everything was put back"
SAME_BATCH = (
    "the model was not seen to receive it: the step takes its own part of the data (torch.randint, "
    "a slice). Give a function that takes its batch as an argument"
)


class Sweep:
    """Drain `run()`, then read `result()`.

    Sizes are doubled from `least` to `most`, as long as they fit and the budget does. Whatever
    happens, models, optimizers, random generators and names end as they began, after an error for
    want of memory too. Raises StepError where the step can't be measured.
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
        """What is known so far."""
        return self._found

    def has_results(self) -> bool:
        """Whether there is anything to show already."""
        return bool(self._found.measured)

    def run(self) -> Generator[Progress, None, None]:
        """Measure; yields after every size. What the step changed is put back at the end."""
        __tracebackhide__ = True
        budget = Budget(self.budget_s, begun_s=self.begun_s)
        with self.step.isolated() as visit:
            self._context: Any = in_force_or_none(self.step.models)
            budget.reserved_s = visit.taking_s
            self._feed = self._make_feed()
            self._found.now, self._found.source = self._feed.now, self._feed.source
            yield Progress(0.0, f"batches of {self._feed.now}")
            self._warm_up(visit.state)
            yield from self._upwards(visit.state, budget)
            yield from self._rounds(visit.state, budget)

    def _warm_up(self, state: State) -> None:
        """A call as the user makes it, whose errors are the user's."""
        __tracebackhide__ = True
        with self._feed.of(self._feed.now) as samples:
            self._count = received if received(self._call) else operations
            if not samples():
                raise StepError("the step never goes through this loader")
        state.restore()

    def _upwards(self, state: State, budget: Budget) -> Generator[Progress, None, None]:
        """Each size once, from the smallest: memory, and about how long it takes."""
        __tracebackhide__ = True
        available = self._found.available_bytes = self._available()
        number = self._least
        while number <= self._most:
            size = Size(number)
            self._found.sizes.append(size)
            needed = self._needs(number)
            if available is not None and needed is not None and needed > (1 - MARGIN) * available:
                size.why_not = "would not fit, by what smaller ones take"
            elif self._would_take_s(number) > LONGEST * self.budget_s or not budget.allows(
                self._would_take_s(number)
            ):
                size.why_not = "was not tried: it takes too long for the budget (--budget)"
            else:
                self._first(size, state)
            if size.why_not:
                yield from self._between(size, state, budget)
                break
            yield Progress(budget.share, f"batches of {number}")
            number = min(number * 2, self._most) if number < self._most else number + 1
        if not self._found.measured:
            raise StepError(
                f"a batch of {self._least} was not measured: {self._found.sizes[0].why_not}"
            )
        self._found.largest = self._largest(available)

    def _between(
        self, failed: Size, state: State, budget: Budget
    ) -> Generator[Progress, None, None]:
        """What lies between the last that ran and the first that did not fit."""
        __tracebackhide__ = True
        for _ in range(HALVED if failed.why_not == OUT and self._found.measured else 0):
            last = max(size.number for size in self._found.measured)
            least = min(size.number for size in self._found.sizes if size.why_not == OUT)
            number = (last + least) // 2
            if number == last or not budget.allows(self._would_take_s(number)):
                return
            size = Size(number)
            self._found.sizes.append(size)
            self._first(size, state)
            self._found.sizes.sort(key=lambda one: one.number)
            yield Progress(budget.share, f"batches of {number}")

    def _first(self, size: Size, state: State) -> None:
        """Its memory, and a first time."""
        __tracebackhide__ = True
        try:
            with self._feed.of(size.number) as samples:
                tensors = memory.state_tensors(self.step.models, self.step.optimizers)
                size.received = self._count(self._call)
                size.samples = samples()
                if not self._grows(size):
                    size.why_not = SAME_BATCH
                    return
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
        """Whether the model received more than of the size before; the first size has the next."""
        __tracebackhide__ = True
        other = max(self._found.measured, key=lambda one: one.number, default=None)
        if other is None:
            other = Size(2 * size.number)
            with self._feed.of(other.number):
                other.received = self._count(self._call)
        return grows(size.received / max(other.received, 1), size.number / other.number)

    def _rounds(self, state: State, budget: Budget) -> Generator[Progress, None, None]:
        """All that ran, in shuffled rounds."""
        __tracebackhide__ = True
        order, shuffled = self._found.measured, random.Random(0)
        counters = {size.number: Counters(self._device) for size in order}
        longest_s = sum(self._block_s(size) for size in order)
        for number in range(ENOUGH):
            if number and not budget.allows(longest_s):
                break
            begun_s = clock.now()
            shuffled.shuffle(order)
            for size in order:
                self._time(size, state, counters[size.number])
                yield Progress(max(budget.share, number / ENOUGH), f"round {number + 1}")
            longest_s = clock.now() - begun_s
        for size in order:
            joules = counters[size.number].each_second().get("energy_j")
            size.energy_j = None if joules is None else joules / size.rate

    def _time(self, size: Size, state: State, counters: Counters) -> None:
        """A block of calls, after one that is not timed where calls are short."""
        __tracebackhide__ = True
        calls = max(1, math.ceil(BLOCK_S / size.first_s))
        with self._feed.of(size.number):
            if size.first_s < LEAD_S:
                self._call()
            taken = [counters.counted(self._timed) for _ in range(calls)]
        size.times_s.append(sum(taken) / len(taken))
        state.restore()

    def _timed(self) -> float:
        __tracebackhide__ = True
        return clock.timed(self._call, self._device)

    def _block_s(self, size: Size) -> float:
        return max(2 * size.first_s, BLOCK_S)

    @door
    def _call(self) -> None:
        __tracebackhide__ = True
        with self.step.around_blocks():
            try:
                self.step.run(self._context)
            except StopIteration:  # would look like the end of a generator of ours
                raise StepError(OUT_OF_DATA) from None

    # What others would take.

    def _available(self) -> int | None:
        """What a step may take, what its state takes already included."""
        free = free_bytes(self._device)
        held = memory.size(memory.state_tensors(self.step.models, self.step.optimizers))
        return None if free is None else free + held

    def _line(self) -> tuple[float, float] | None:
        """Bytes of no sample, and of each: through the last two sizes."""
        known = [size for size in self._found.measured if size.peak_bytes is not None]
        if len(known) < 2:
            return None
        one, other = known[-2:]
        assert one.peak_bytes is not None
        assert other.peak_bytes is not None
        each = (other.peak_bytes - one.peak_bytes) / (other.number - one.number)
        return other.peak_bytes - each * other.number, each + self._feed.sample_bytes

    def _needs(self, number: int) -> float | None:
        line = self._line()
        return None if line is None else line[0] + line[1] * number

    def _would_take_s(self, number: int) -> float:
        """About the seconds of its first calls, by the smaller size that says the least."""
        each = (size.first_s / size.number for size in self._found.measured)
        return CALLS * number * min(each, default=0.0)

    def _largest(self, available: int | None) -> int | None:
        """The largest that fits, by the growth of memory; no larger than what failed, nor than what
        can be told from those that ran: another part of the step may be the fullest later.
        """
        line, ran = self._line(), [size.number for size in self._found.measured]
        if any(size.why_not == OUT for size in self._found.sizes):
            return max(ran)
        if line is None or available is None or line[1] <= 0:
            return None
        fits = math.floor(((1 - MARGIN) * available - line[0]) / line[1])
        return max(min(fits, FAR * max(ran)), max(ran))
