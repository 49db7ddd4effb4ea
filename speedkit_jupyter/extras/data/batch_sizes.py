"""Measure samples per second and peak memory of a step by batch size; restore all state."""

from __future__ import annotations

import gc
import math
import re
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.data.batch_report import OUT, TOO_LARGE, BatchSizes, Size
from speedkit_jupyter.extras.data.loader_settings import begun_with
from speedkit_jupyter.extras.data.loader_tuner import LOADING_BUDGET_S, check_loader
from speedkit_jupyter.extras.data.micro_batch import length_of, selected
from speedkit_jupyter.machines import devices
from speedkit_jupyter.machines.hardware import host_memory
from speedkit_jupyter.plans.applying import in_force_or_none
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.comparison import Progress, drained, environment
from speedkit_jupyter.rounds.shuffled_rounds import ShuffledRounds, block_length
from speedkit_jupyter.rounds.timing import device_of
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.step import memory
from speedkit_jupyter.step.step import EMPTY, Step, arguments_of, refuse_unfit_call, step_of
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue.interrupts import interruptible_in_users_code
from speedkit_jupyter.torchglue.private import tree_leaves

# Default sizes: 8, doubled up to 4096.
RANGE = (8, 4096)
# The sweep ends before a size whose four calls would take more than this share of the budget.
LONGEST_SHARE = 0.2
# Largest number of rounds; the interval is then a few percent wide.
ENOUGH_ROUNDS = 25
# A size may use this share of the memory that is free or already holds the step's state.
USABLE_MEMORY = 0.9
# Messages of torch's CPU allocator (c10/core/impl/alloc_cpu.cpp), cuDNN and cuBLAS.
OUT_OF_MEMORY = re.compile(
    r"not enough memory|can't allocate memory|out of memory|STATUS_ALLOC_FAILED", re.IGNORECASE
)
TOO_LONG = "was not tried: it takes too long for the budget (--budget)"


@interruptible_in_users_code
def batch_sizes(
    step: Callable[..., object],
    batch: Any = None,
    *,
    loader: DataLoader[Any] | None = None,
    sizes: tuple[int, int] = RANGE,
    budget_s: float | None = None,
) -> BatchSizes:
    """Return samples per second and peak memory of a step by batch size; undo the step's changes.

    Loading is not timed. The sweep ends at the first size that runs out of memory, that would not
    fit, or that takes too long. Example: `batch_sizes(train_on_batch, (x, y)).rows()`.

    Args:
        step: a function of a batch; or a function without arguments that loops over `loader`.
        batch: a tensor or container (a tuple for several arguments); too few samples are repeated.
        loader: a DataLoader, whose first batch is used if there is no `batch`.
        sizes: the smallest and largest size (default: 8 and 4096); in between, sizes double.
        budget_s: seconds for everything (default: 20).

    Returns:
        A BatchSizes: its `rows()` have samples per second with an interval, and peak bytes.

    Raises:
        StepError: the step can't be measured, or an argument is invalid.
    """
    return drained(BatchSweep(step, batch, loader, sizes, budget_s))


class BatchSweep:
    """Sweep batch sizes: drain `run()`, then read `result()`; arguments as for `batch_sizes`."""

    def __init__(
        self,
        step: Callable[..., object] | Step,
        batch: Any,
        loader: DataLoader[Any] | None,
        sizes: tuple[int, int],
        budget_s: float | None,
        command: str = "",
        name: str = "",
    ) -> None:
        if loader is not None:
            check_loader(loader)
        if isinstance(step, Step):
            self._takes, measured = 0, step
        else:
            self._takes, measured = arguments_of(step), step_of(step)
        name = name or getattr(step, "__name__", "step")
        if not self._takes and (loader is None or batch is not None):
            raise StepError(f"{name} takes no batch: give only the loader that it loops over")
        if batch is None and loader is None:
            raise StepError(f"{name} takes a batch: give one, as in batch_sizes({name}, (x, y))")
        if not isinstance(sizes, tuple) or len(sizes) != 2:
            raise StepError(f"sizes must be the least and the most, as (1, 64), not {sizes!r:.40}")
        least, self._most = (arguments.whole("sizes", size) for size in sizes)
        if not 1 <= least <= self._most:
            raise StepError(f"sizes must go upwards from 1, not from {least} to {self._most}")
        self._least, self._is_drawn = least, False
        self.budget_s = arguments.seconds("budget_s", budget_s) or LOADING_BUDGET_S
        self._given, self._batch = batch, list[Any]()
        self._loader: Any = loader
        self._called: Any = step
        run = (lambda _: step(*self._batch)) if self._takes else measured.run  # type: ignore[operator]
        self.step = replace(measured, run=run, others=[*measured.others, loader, batch])
        self._device = device_of(self.step)
        command = command or f"batch_sizes({name}{', batch' * bool(self._takes)})"
        self._found = BatchSizes(name, environment=environment(self._device), command=command)

    def result(self) -> BatchSizes:
        return self._found

    def has_results(self) -> bool:
        return bool(self._found.measured)

    def run(self) -> Generator[Progress, None, None]:
        """Measure; yield after every size and block. The step's state is restored at the end."""
        budget = Budget(self.budget_s)
        with self.step.guarded() as guard:
            self._context: Any = in_force_or_none(self.step.models)
            budget.reserved_s = guard.taking_s
            self._own = self._first_batch()
            if self._takes:
                refuse_unfit_call(self._called, self._own)
            now = self._found.now = length_of(self._own) or 0
            if not now:
                raise StepError("no list, dict or tensor of the batch has a row for each sample")
            with begun_with(None if self._takes else self._loader, self._begin):
                yield Progress(0.0, f"batches of {now}")
                with self._of(now):
                    self._call()  # errors with the user's own batch are raised
                if not (self._takes or self._is_drawn):
                    raise StepError("the step never goes through this loader")
                guard.state.restore()
                yield from self._upwards(guard.state, budget)
                yield from self._rounds(guard.state, budget)

    def _first_batch(self) -> list[Any]:
        """Return the step's arguments; if the step loops over the loader, a list with one batch."""
        given = self._given
        first = next(iter(self._loader), None) if given is None else given
        if first is None:
            raise StepError(EMPTY)
        is_alone = isinstance(given, tuple) and len(given) == 1
        is_spread = isinstance(first, list | tuple) and (self._takes > 1 or is_alone)
        return list(first) if is_spread else [first]

    def _begin(self) -> Iterator[Any]:
        self._is_drawn = True
        return iter(self._batch)

    @contextmanager
    def _of(self, number: int) -> Iterator[None]:
        try:
            self._batch[:] = resized(self._own, number)
            yield
        finally:
            self._batch[:] = self._own

    def _upwards(self, state: Snapshot, budget: Budget) -> Generator[Progress, None, None]:
        """Try sizes from the smallest up; measure peak memory and time two calls of each size."""
        found = self._found
        held = memory.size(memory.state_tensors(self.step.models, self.step.optimizers))
        free = free_bytes(self._device)
        self._available_bytes = math.inf if free is None else free + held
        size = Size(self._least)
        while True:
            found.sizes.append(size)
            size.why_not = self._why_not(size.number, budget) or self._first(size, state)
            if size.why_not or size.number == self._most:
                break
            yield Progress(budget.share, f"batches of {size.number}")
            size = Size(min(size.number * 2, self._most))
        if not found.measured:
            raise StepError(f"a batch of {size.number} was not measured: {size.why_not}")

    def _why_not(self, number: int, budget: Budget) -> str:
        if self._needed_bytes(number) > USABLE_MEMORY * self._available_bytes:
            return TOO_LARGE
        each_s = min((one.first_s / one.number for one in self._found.measured), default=0.0)
        takes_s = 4 * number * each_s
        is_long = takes_s > LONGEST_SHARE * self.budget_s or not budget.allows(takes_s)
        return TOO_LONG if takes_s and is_long else ""

    def _needed_bytes(self, number: int) -> float:
        """Return the bytes to expect at a size, from the last two peaks; 0 without two peaks."""
        known = [(one.number, one.peak_bytes) for one in self._found.measured if one.peak_bytes]
        if len(known) < 2:
            return 0.0
        (before, before_bytes), (last, last_bytes) = known[-2:]
        each = (last_bytes - before_bytes) / (last - before)
        sample = sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(self._own))
        return last_bytes + each * (number - last) + number * sample / self._found.now

    def _first(self, size: Size, state: Snapshot) -> str:
        """Measure memory, time two calls, restore state; return OUT if memory runs out, else ""."""
        try:
            with self._of(size.number):
                self._call()  # creates optimizer state
                tensors = memory.state_tensors(self.step.models, self.step.optimizers)
                size.peak_bytes = memory.needed(self._call, self._device, tensors).peak_bytes
                size.first_s = min(clock.timed(self._call, self._device) for _ in range(2))
            return ""
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            size.first_s = 0.0
            # The traceback's frames keep the failed step's tensors alive.
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
            gc.collect()
            devices.release_cached()
            return OUT
        finally:
            state.restore()

    def _rounds(self, state: Snapshot, budget: Budget) -> Generator[Progress, None, None]:
        measured, left_s = self._found.measured, lambda: budget.room_s
        rounds = ShuffledRounds(measured, left_s, most=ENOUGH_ROUNDS)
        for order in rounds:
            for size in order:
                calls = block_length(size.first_s)
                with self._of(size.number):
                    self._call()  # warms up
                    taken_s = [clock.timed(self._call, self._device) for _ in range(calls)]
                size.times_s.append(sum(taken_s) / calls)
                state.restore()
                done = max(budget.share, (rounds.number - 1) / ENOUGH_ROUNDS)
                yield Progress(done, f"round {rounds.number}")

    def _call(self) -> None:
        with self.step.around_blocks():
            self.step.call(self._context)


def is_out_of_memory(error: BaseException) -> bool:
    is_torchs = isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error))
    return bool(is_torchs) or isinstance(error, torch.OutOfMemoryError | MemoryError)


def free_bytes(device: torch.device) -> int | None:
    """Return a device's free bytes, including torch's unused cache; None if unknown."""
    if device.type == "cpu":
        return int(host_memory().available)
    return devices.named(device.type).free_bytes(device)


def resized(batch: Any, number: int) -> Any:
    """Return the first `number` samples of a batch, repeated if there are too few."""
    length = length_of(batch) or 1
    return selected(batch, length, [at % length for at in range(number)])
