"""Measures a step with batches of many sizes, then everything is put back."""

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
from speedkit_jupyter.extras.data.loader_tuner import check_loader
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

DEFAULT_S, RANGE = 20.0, (8, 4096)
# A size is left out where its first CALLS would take more than this share of the budget; ENOUGH
# rounds are enough.
LONGEST, CALLS, ENOUGH = 0.2, 4, 25
# This share of the free memory stays free; nothing is said of batches beyond FAR times the largest
# that ran.
MARGIN, FAR = 0.1, 16
# From one batch size to another the model receives more by this share of the (logarithmic) growth,
# at the least: inputs that are the same for every size (a table, a mask) may come beside the batch.
GROWTH = 0.5
# What torch's allocators say (c10/core/impl/alloc_cpu.cpp, cuDNN, cuBLAS).
OUT_OF_MEMORY = re.compile(
    r"not enough memory|can't allocate memory|out of memory|STATUS_ALLOC_FAILED", re.IGNORECASE
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
    allows. All that the step changes is put back, after running out of memory too. Raises StepError
    where the step can't be measured.
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
        """Measure; yield after every size. What the step changed is put back at the end."""
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
        """Try each size once, from the smallest: memory, and about how long it takes."""
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

    def _why_not(self, number: int, budget: Budget) -> str:
        """Return why a size is not tried; empty where it is."""
        line, available = self._line(), self._found.available_bytes
        if line and available is not None and line[0] + line[1] * number > (1 - MARGIN) * available:
            return TOO_LARGE
        # By the smaller size that takes least for a sample.
        each_s = min((one.first_s / one.number for one in self._found.measured), default=0.0)
        takes_s = CALLS * number * each_s
        is_long = takes_s > LONGEST * self.budget_s or not budget.allows(takes_s)
        return TOO_LONG if takes_s and is_long else ""

    def _first(self, size: Size, state: Snapshot) -> str:
        """Measure what its model receives, its memory, and a first time; return why not."""
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
            # Its traceback keeps what the failed step held.
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
            gc.collect()
            devices.release_cached()
            return OUT
        finally:
            state.restore()

    def _grows(self, size: Size) -> bool:
        """Return whether the model received more than of another size, if it calls modules."""
        smaller = self._found.measured
        other = smaller[-1] if smaller else Size(2 * size.number)
        if not smaller:
            with self._feed.of(other.number):
                other.received = received(self._call)
        if not size.received:
            return True
        growth = math.log(size.received / max(other.received, 1))
        return growth / math.log(size.number / other.number) >= GROWTH

    def _rounds(self, state: Snapshot, budget: Budget) -> Generator[Progress, None, None]:
        """Time all that ran, in shuffled rounds."""
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
        """Return the bytes of no sample, and of each: through the last two sizes."""
        known = [(one.number, one.peak_bytes) for one in self._found.measured if one.peak_bytes]
        if len(known) < 2:
            return None
        (number, peak_bytes), (other, other_bytes) = known[-2:]
        each = (other_bytes - peak_bytes) / (other - number)
        return other_bytes - each * other, each + self._feed.sample_bytes

    def _largest(self) -> int | None:
        """Return the largest that fits, by the growth of memory; where one failed, the last before
        it. Far beyond those that ran another part of the step may take most memory.
        """
        line, ran = self._line(), self._found.measured[-1].number
        available = self._found.available_bytes
        if any(size.why_not == OUT for size in self._found.sizes):
            return ran
        if line is None or available is None or line[1] <= 0:
            return None
        fits = math.floor(((1 - MARGIN) * available - line[0]) / line[1])
        return max(min(fits, FAR * ran), ran)


def received(call: Callable[[], object]) -> int:
    """Make the call; return how many numbers all modules in it were given."""
    given: list[int] = []

    def noted(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        given.extend(one.numel() for one in tensors_in((args, kwargs)))
        return original(module, *args, **kwargs)

    with patched(torch.nn.Module, "__call__", partial(partial, noted)):
        call()
    return sum(given)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether it was raised for want of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(OUT_OF_MEMORY.search(str(error)))


def free_bytes(device: torch.device) -> int | None:
    """Return what may be allocated, with what torch keeps for later; None where it is unknown."""
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
    """Return samples a second and peak memory of a step, for batch sizes from the first to the
    second of `sizes`, each twice the one before.

    `step` takes a batch: of `batch` (a tensor, or a tuple of several arguments) or of `loader`,
    whose samples are repeated where it has too few; or it takes none, and goes through `loader`, or
    reads tensors by their names: those of `batch`, or without one those that are alike in length.
    Loading is not timed. A size that runs out of memory is survived, and what would not fit by the
    growth of memory is not tried. Nothing is changed: another batch size is another training.
    `budget_s` is the total budget in seconds (20 without it). Raises StepError where the step can't
    be measured.
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
) -> Sweep:
    """Return the sweep of a function, or of a step that gets its batches itself: from a loader, or
    by the names of tensors, which are found, or those of the `batch`. Raises StepError.
    """
    if loader is not None:
        check_loader(loader)
    measured, takes = (step, 0) if isinstance(step, Step) else (step_of(step), arguments_of(step))
    measured.others = [*measured.others, *([] if loader is None else [loader]), batch]
    name = name or getattr(step, "__name__", "step")
    given = () if batch is None else batch if isinstance(batch, tuple) else (batch,)
    if not takes:
        if loader is not None and given:
            raise StepError(f"{name} takes no argument: it goes through a loader or reads a batch")
        make = partial(feeds.named, measured, given)
        found = BatchSizes(name, command=command or f"batch_sizes({name})")
        through = make if loader is None else partial(feeds.through, loader)
        return Sweep(measured, through, found, sizes, budget_s)
    if batch is None and loader is None:
        raise StepError(f"{name} takes a batch: give one, as in batch_sizes({name}, (x, y))")
    held: list[Any] = []

    def feed() -> Feed:
        first = feeds.first_of(loader) if batch is None and loader is not None else batch
        is_spread = isinstance(first, list | tuple) and (takes > 1 or len(given) == 1)
        held[:] = first if is_spread else [first]
        return Feed(list(held), partial(held.__setitem__, slice(None)), "the batch that it takes")

    measured.run = lambda _: step(*held)  # type: ignore[operator]
    found = BatchSizes(name, command=command or f"batch_sizes({name}, batch)")
    return Sweep(measured, feed, found, sizes, budget_s)
