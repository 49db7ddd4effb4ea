"""Measures a step with batches of several sizes, then everything is put back."""

from __future__ import annotations

import gc
import math
import re
import traceback
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.data import feeds
from speedkit_jupyter.extras.data.batch_sizes import BatchSizes, Size
from speedkit_jupyter.extras.data.feeds import Feed
from speedkit_jupyter.extras.data.loader_tuner import DEFAULT_S, check_loader
from speedkit_jupyter.machines import devices
from speedkit_jupyter.plans.applying import in_force_or_none
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.from_function import step_of
from speedkit_jupyter.rounds.record import environment
from speedkit_jupyter.rounds.sampler import Progress
from speedkit_jupyter.rounds.shuffled_rounds import ShuffledRounds, block_length
from speedkit_jupyter.rounds.timeit_run import device_of
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.step import memory
from speedkit_jupyter.step.over_batches import arguments_of
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue.confinement import patched
from speedkit_jupyter.torchglue.interrupts import interruptible
from speedkit_jupyter.torchglue.samples import tensors_in

# The sizes that are tried by default, doubled from the first to the last.
RANGE = (8, 4096)
# A size is left out if its first four calls would take more than this share of the budget.
LONGEST = 0.2
# The interval of this many rounds is within some percent.
ENOUGH = 25
# A tenth of the free memory stays free: fragments and other processes take some of it.
USABLE = 0.9
# Nothing is claimed about batches beyond 16 times the largest that ran: other parts of the step may
# take most memory there.
FAR = 16
# Messages of torch's allocators (c10/core/impl/alloc_cpu.cpp, cuDNN, cuBLAS).
OUT_OF_MEMORY = re.compile(
    r"not enough memory|can't allocate memory|out of memory|STATUS_ALLOC_FAILED", re.IGNORECASE
)
OUT = "out of memory: everything was put back"
TOO_LARGE = "would not fit, by the memory of smaller sizes"
TOO_LONG = "was not tried: it takes too long for the budget (--budget)"
SAME_BATCH = (
    "the model was not seen to receive it: the step takes its own part of the data (torch.randint, "
    "a slice). Give a function that takes its batch as an argument"
)


class BatchSweep:
    """Drain `run()`, then read `result()`.

    Sizes are doubled from the first to the last of `sizes`, as long as they fit and the budget
    allows. All that the step changes is put back, also after running out of memory. Raises
    StepError if the step can't be measured.
    """

    def __init__(
        self,
        step: Step,
        feed: Callable[[], Feed],
        found: BatchSizes,
        sizes: tuple[int, int],
        budget_s: float | None = None,
    ) -> None:
        self.step, self._make_feed, self._found = step, feed, found
        self._device = device_of(step)
        self._least, self._most = (arguments.whole("sizes", size) for size in sizes)
        if not 1 <= self._least <= self._most:
            raise StepError(
                f"sizes must go from 1 or more upwards, not from {self._least} to {self._most}"
            )
        self.budget_s = arguments.seconds("budget_s", budget_s) or DEFAULT_S
        found.environment = environment(self._device)

    def result(self) -> BatchSizes:
        return self._found

    def has_results(self) -> bool:
        return bool(self._found.measured)

    def run(self) -> Generator[Progress, None, None]:
        """Measure; yield after every size. The state of the step is put back at the end."""
        budget = Budget(self.budget_s)
        with self.step.guarded() as guard:
            self._context: Any = in_force_or_none(self.step.models)
            budget.reserved_s = guard.taking_s
            feed = self._feed = self._make_feed()
            self._found.now, self._found.source = feed.now, feed.source
            with feed.installed():
                yield Progress(0.0, f"batches of {feed.now}")
                with feed.of(feed.now):
                    self._call()  # as the user does, whose errors are the user's
                    if not feed.drawn():
                        raise StepError("the step never goes through this loader")
                guard.state.restore()
                yield from self._upwards(guard.state, budget)
                yield from self._rounds(guard.state, budget)

    def _upwards(self, state: Snapshot, budget: Budget) -> Generator[Progress, None, None]:
        """Try each size once, the smallest first: its memory, and a first time."""
        found = self._found
        held = memory.size(memory.state_tensors(self.step.models, self.step.optimizers))
        free = free_bytes(self._device)
        found.available_bytes = None if free is None else free + held
        size = Size(self._least)
        while True:
            found.sizes.append(size)
            size.why_not = self._why_not(size.number, budget) or self._first(size, state)
            if size.why_not or size.number == self._most:
                break
            yield Progress(budget.share, f"batches of {size.number}")
            size = Size(min(size.number * 2, self._most))
        if not found.measured:
            raise StepError(f"a batch of {self._least} was not measured: {size.why_not}")
        found.largest = self._largest()
        most = found.measured[-1].number
        found.is_largest_tried = found.largest in (most, FAR * most)

    def _why_not(self, number: int, budget: Budget) -> str:
        """Return the reason why a size is not tried; empty if it is."""
        line, available = self._line(), self._found.available_bytes
        if line and available is not None and line[0] + line[1] * number > USABLE * available:
            return TOO_LARGE
        # By the size with the fastest samples so far.
        each_s = min((one.first_s / one.number for one in self._found.measured), default=0.0)
        takes_s = 4 * number * each_s
        is_long = takes_s > LONGEST * self.budget_s or not budget.allows(takes_s)
        return TOO_LONG if takes_s and is_long else ""

    def _first(self, size: Size, state: Snapshot) -> str:
        """Measure inputs of modules, memory, and a first time; return the reason if it fails."""
        try:
            with self._feed.of(size.number):
                size.received = received(self._call)
                size.samples = size.number * self._feed.drawn()
            if not self._grows(size):
                return SAME_BATCH
            with self._feed.of(size.number):
                tensors = memory.state_tensors(self.step.models, self.step.optimizers)
                size.peak_bytes = memory.needed(self._call, self._device, tensors).peak_bytes
                size.first_s = min(clock.timed(self._call, self._device) for _ in range(2))
            return ""
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            size.first_s = 0.0
            # Frames of the traceback keep the tensors of the failed step.
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
            gc.collect()
            devices.release_cached()
            return OUT
        finally:
            state.restore()

    def _grows(self, size: Size) -> bool:
        """Return whether modules received more than with another size, if the step calls any."""
        smaller = self._found.measured
        other = smaller[-1] if smaller else Size(2 * size.number)
        if not smaller:
            with self._feed.of(other.number):
                other.received = received(self._call)
        if not size.received:
            return True
        growth = math.log(size.received / max(other.received, 1))
        # Half of the growth is enough: inputs of one size (a table, a mask) may come with a batch.
        return growth / math.log(size.number / other.number) >= 0.5

    def _rounds(self, state: Snapshot, budget: Budget) -> Generator[Progress, None, None]:
        """Time all sizes that ran, in shuffled rounds."""
        rounds = ShuffledRounds(lambda: self._found.measured, lambda: budget.room_s, most=ENOUGH)
        for order in rounds:
            for size in order:
                calls = block_length(size.first_s)
                with self._feed.of(size.number):
                    self._call()  # warms up
                    taken_s = [clock.timed(self._call, self._device) for _ in range(calls)]
                size.times_s.append(sum(taken_s) / calls)
                state.restore()
                done = max(budget.share, (rounds.number - 1) / ENOUGH)
                yield Progress(done, f"round {rounds.number}")

    def _call(self) -> None:
        with self.step.around_blocks():
            self.step.call(self._context)

    def _line(self) -> tuple[float, float] | None:
        """Return the bytes without samples, and of each sample: a line through the last sizes."""
        known = [(one.number, one.peak_bytes) for one in self._found.measured if one.peak_bytes]
        if len(known) < 2:
            return None
        (number, peak_bytes), (other, other_bytes) = known[-2:]
        each = (other_bytes - peak_bytes) / (other - number)
        return other_bytes - each * other, each + self._feed.sample_bytes

    def _largest(self) -> int | None:
        """Return the largest size that fits: the last before one that failed, or by that line."""
        line, ran = self._line(), self._found.measured[-1].number
        available = self._found.available_bytes
        if any(size.why_not == OUT for size in self._found.sizes):
            return ran
        if line is None or available is None or line[1] <= 0:
            return None
        fits = math.floor((USABLE * available - line[0]) / line[1])
        return max(min(fits, FAR * ran), ran)


def received(call: Callable[[], object]) -> int:
    """Make the call; return how many numbers its modules received in all."""
    given: list[int] = []

    def noted(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        given.extend(one.numel() for one in tensors_in((args, kwargs)))
        return original(module, *args, **kwargs)

    with patched(torch.nn.Module, "__call__", partial(partial, noted)):
        call()
    return sum(given)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error was raised for want of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(OUT_OF_MEMORY.search(str(error)))


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that may be allocated, with torch's cache; None if unknown."""
    if device.type == "cpu":
        import psutil

        return int(psutil.virtual_memory().available)
    allocator = torch.get_device_module(device)
    if not hasattr(allocator, "mem_get_info"):
        return None
    kept = allocator.memory_reserved(device) - allocator.memory_allocated(device)
    return int(allocator.mem_get_info(device)[0]) + int(kept)


@interruptible
def batch_sizes(
    step: Callable[..., object],
    batch: Any = None,
    *,
    loader: DataLoader[Any] | None = None,
    sizes: tuple[int, int] = RANGE,
    budget_s: float | None = None,
) -> BatchSizes:
    """Return samples a second and peak memory of a step by batch size, and change nothing.

    Loading is not timed. A size that runs out of memory is survived, and sizes that would not fit
    by the growth of memory are not tried.

    Args:
        step: a function of a batch; or a function without arguments that goes through `loader`, or
            that reads tensors by their names: the tensors of `batch`, or all of the same length.
        batch: a tensor, or a tuple of several arguments. Samples are repeated if there are too few.
        loader: a DataLoader whose first batch is taken.
        sizes: the first and the last size; each size is twice the one before.
        budget_s: seconds for everything (20 by default).

    Returns:
        A BatchSizes: its `rows()` have samples a second with interval, and peak memory.

    Raises:
        StepError: if the step can't be measured.
    """
    sweep = sweep_of(step, batch, loader, sizes, budget_s)
    for _ in sweep.run():
        pass
    return sweep.result()


def sweep_of(
    step: Callable[..., object] | Step,
    batch: Any,
    loader: DataLoader[Any] | None,
    sizes: tuple[int, int],
    budget_s: float | None,
    command: str = "",
    name: str = "",
) -> BatchSweep:
    """Return the sweep of a function, or of a step that gets its batches itself.

    Raises StepError if it can't be measured.
    """
    if loader is not None:
        check_loader(loader)
    measured, takes = (step, 0) if isinstance(step, Step) else (step_of(step), arguments_of(step))
    measured.others = [*measured.others, *([] if loader is None else [loader]), batch]
    name = name or getattr(step, "__name__", "step")
    given = () if batch is None else batch if isinstance(batch, tuple) else (batch,)
    found = BatchSizes(name, command=command or f"batch_sizes({name}{', batch' * bool(takes)})")
    if not takes:
        if loader is not None and given:
            raise StepError(f"{name} takes no argument: it goes through a loader or reads a batch")
        by_name = partial(feeds.named, measured, given)
        through = by_name if loader is None else partial(feeds.through, loader)
        return BatchSweep(measured, through, found, sizes, budget_s)
    if batch is None and loader is None:
        raise StepError(f"{name} takes a batch: give one, as in batch_sizes({name}, (x, y))")
    held: list[Any] = []

    def feed() -> Feed:
        first = feeds.first_of(loader) if batch is None and loader is not None else batch
        is_spread = isinstance(first, list | tuple) and (takes > 1 or len(given) == 1)
        held[:] = first if is_spread else [first]
        return Feed(list(held), partial(held.__setitem__, slice(None)), "the batch that it takes")

    measured.run = lambda _: step(*held)  # type: ignore[operator]
    return BatchSweep(measured, feed, found, sizes, budget_s)
