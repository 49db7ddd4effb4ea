"""Time the user's step with each loader, in shuffled rounds, and drop slow loaders."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.data import loader_settings
from speedkit_jupyter.extras.data.loader_settings import LoaderSettings
from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.plans.applying import in_force_or_none
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.comparison import DROPPED
from speedkit_jupyter.rounds.shuffled_rounds import block_length
from speedkit_jupyter.rounds.statistics import ERROR, Ratio, bonferroni_share, paired_ratio
from speedkit_jupyter.rounds.timing import device_of
from speedkit_jupyter.step.step import EMPTY, Step
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue.interrupts import interrupts_delayed
from speedkit_jupyter.torchglue.modules import end_workers

# (rounds, factor): after these rounds, a loader is dropped if its median time is over `factor` ×
# the fastest loader's. Medians of three rounds vary by a third, medians of eight by a tenth.
SLOWER_AFTER = ((3, 1.5), (8, 1.15))
# Fewest and most rounds of a race: fewer give wide intervals, more give hardly narrower ones.
LEAST_ROUNDS, MOST_ROUNDS = 8, 100
# A gain below this factor is not worth a change of the loader.
LEAST_GAIN = 1.02
# A window of timed batches takes WINDOW_S seconds, because workers deliver batches in bursts. It is
# shorter if the budget allows less than 12 rounds of 4 loaders. Calls up to WHOLE windows long, or
# 0.25 s, are timed as a whole; of longer calls, a window of LEAST_BATCHES batches or more.
WINDOW_S, WHOLE, LEAST_BATCHES = 0.3, 3, 2
# Largest worker count. In long epochs, enough batches precede a window to make all workers busy.
MOST_WORKERS = loader_settings.WORKER_COUNTS[-1]
NO_LOOP = "the step never goes through this loader: give a function that loops over it"
END = object()
# A function that times a loader in a round, and returns (step, waiting) in seconds per batch.
Block = Callable[["LoaderWay", int], tuple[float, float]]


@dataclass(eq=False)
class LoaderWay:
    """A loader in the race: its settings, and its seconds per batch (wait and step) by round."""

    settings: LoaderSettings
    times_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)  # the waiting time in `times_s`
    why_out: str = ""  # the reason for leaving the race
    loader: Any = field(default=None, repr=False)

    @property
    def batch_s(self) -> float:
        return median(self.times_s) if self.times_s else math.inf

    @property
    def waiting(self) -> float:
        total_s = sum(self.times_s)
        return sum(self.waits_s) / total_s if total_s else 0.0

    def leave(self, why: str = "") -> None:
        """End the loader's workers; with a reason `why`, leave the race."""
        self.why_out = self.why_out or why
        if self.loader is not None:
            loader_settings.end_workers(self.loader)


@dataclass
class LoaderRace:
    """A race of loaders, the `ways`; the first is the user's own loader, which is never dropped."""

    ways: list[LoaderWay]

    @property
    def own(self) -> LoaderWay:
        return self.ways[0]

    @property
    def racing(self) -> list[LoaderWay]:
        return [one for one in self.ways if not one.why_out]

    @property
    def rounds(self) -> int:
        return len(self.own.times_s)

    def admit(self, more: Iterable[LoaderSettings], enter: Callable[[LoaderWay], object]) -> None:
        for one in map(LoaderWay, more):
            self.ways.append(one)
            self._attempt(one, partial(enter, one))

    def round(self, order: Sequence[LoaderWay], block: Block) -> Iterator[LoaderWay]:
        """Time each loader's block in the given order; yield after each; drop slow loaders."""
        blocks = dict[LoaderWay, tuple[float, float]]()
        for one in order:
            if times_s := self._attempt(one, partial(block, one, self.rounds)):
                blocks[one] = times_s
            yield one
        mine = self.own.settings
        for one, (step_s, wait_s) in blocks.items():
            # Another loader may shorten the wait. It can shorten the step only by pinned memory,
            # or by fewer workers, which leave more cores to the step.
            settings = one.settings
            if settings.pin_memory == mine.pin_memory and settings.num_workers >= mine.num_workers:
                step_s = max(step_s, blocks[self.own][0])
            one.times_s.append(step_s + wait_s)
            one.waits_s.append(wait_s)
        for one in self.racing[1:]:
            allowed = [times for rounds, times in SLOWER_AFTER if len(one.times_s) >= rounds]
            if allowed and one.batch_s > allowed[-1] * self.fastest.batch_s:
                one.leave(DROPPED)

    def _attempt(self, one: LoaderWay, call: Callable[[], Any]) -> Any:
        """Return `call()`. On an error, drop the loader, or raise if the loader is the user's."""
        # After workers that gave no batch, skip other workers: each could take a whole timeout.
        new = [way for way in self.ways[1:] if way.settings.num_workers and not way.times_s]
        if one in new and any(way.why_out for way in new):
            one.leave("not tried: other workers gave no batch")
            return None
        try:
            return call()
        except Exception as error:
            if one is self.own:  # errors of the user's own loader are raised
                raise
            # The last line of a worker's error contains the error's class.
            kind, line = type(error).__name__, str(error).strip().rpartition("\n")[2].strip()
            one.leave(line if line.startswith(f"{kind}:") else f"{kind}: {line}")
            return None

    @property
    def fastest(self) -> LoaderWay:
        return min(self.racing, key=lambda one: one.batch_s)

    def proven(self) -> LoaderWay:
        """Return the fastest loader if proven faster, by LEAST_GAIN in the median; else `own`."""
        ratio = self.ratio(self.fastest)
        is_faster = ratio is not None and ratio.low > 1 and ratio.median >= LEAST_GAIN
        return self.fastest if is_faster else self.own

    def ratio(self, one: LoaderWay) -> Ratio | None:
        """Return the speed-up of a loader over the user's own, or None before its first round."""
        if not one.times_s:
            return None
        own_s = self.own.times_s[: len(one.times_s)]
        return paired_ratio(own_s, one.times_s, bonferroni_share(ERROR, len(self.ways) - 1))

    def is_settled(self) -> bool:
        ratios = [self.ratio(one) for one in self.racing[1:]]
        is_clear = all(one is not None and one.settled for one in ratios)
        return self.rounds >= (LEAST_ROUNDS if is_clear else MOST_ROUNDS)


class WindowClosed(BaseException):
    """End a call after its window; a BaseException, because the step may catch any Exception."""


@dataclass
class Skipping:
    """A sampler or batch sampler without its first `number` items."""

    sampler: Any
    number: int = 0

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self.number, None)


@dataclass
class BatchWindow:
    """A block's batches: `lead` untimed batches, then a window of up to `most` timed batches."""

    device: torch.device
    lead: int = 0
    most: float = math.inf
    until_s: float = math.inf  # after this time, LEAST_BATCHES timed batches are enough
    drawn: int = 0
    timed: int = 0
    begun_s: float = 0.0  # seconds of starting epochs before the window
    opened_s: float | None = None
    window_s: float = 0.0  # including `waited_s` of waiting
    waited_s: float = 0.0
    longest: int = 0  # the most batches of one loop
    was_left: bool = False  # a loop ended early
    was_cut: bool = False  # the window ended the call

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        begun_s = clock.now()
        with interrupts_delayed():  # workers must not be interrupted while they start
            # Not `iter(loader)`: a subclass's `__iter__` already runs in the user's loop.
            iterator = DataLoader.__iter__(loader)
        taken_s, given, batch = clock.now() - begun_s, 0, None
        if self.opened_s is None:
            self.begun_s += taken_s
        else:
            self.waited_s += taken_s
        try:
            while (batch := self._next(iterator)) is not END:
                given += 1
                self.longest = max(self.longest, given)
                yield batch
        finally:
            self.was_left |= batch is not END
            if not loader.persistent_workers:
                with interrupts_delayed():
                    end_workers(iterator)

    def _next(self, iterator: Iterator[Any]) -> Any:
        least = LEAST_BATCHES if clock.now() > self.until_s else self.most
        if self.timed >= least:
            self.was_cut = True
            self.close()
            raise WindowClosed
        if self.opened_s is None and self.drawn >= self.lead:
            synchronize(self.device)
            self.opened_s = clock.now()
        is_open, asked_s = self.opened_s is not None, clock.now()
        batch = next(iterator, END)
        self.waited_s += (clock.now() - asked_s) * is_open
        if batch is END and not self.drawn:
            raise StepError(EMPTY)
        self.drawn += batch is not END
        self.timed += is_open and batch is not END
        return batch

    def close(self) -> None:
        if self.opened_s is not None and not self.window_s:
            synchronize(self.device)
            self.window_s = clock.now() - self.opened_s


class LoaderTimer:
    """Time the step with each loader from the same state; of long calls, time only a window."""

    def __init__(
        self, step: Step, loader: DataLoader[Any], budget_s: float, restore: Callable[[], object]
    ) -> None:
        self._step, self._loader, self._device = step, loader, device_of(step)
        self._budget_s, self.restore = budget_s, restore
        self._context: Any = in_force_or_none(step.models)
        self._most = 0  # batches per window; 0 if calls are timed as a whole
        self._block_s = min(WINDOW_S, budget_s / (12 * 4))
        self._batch_s = 0.0
        # Batches per epoch (at first 1000 if unknown), or per loop that ends early.
        self.epoch = loader_settings.length(loader) or 1000

    def begin(self, own: LoaderWay) -> None:
        """Call the step twice with the user's own loader, and choose the length of windows."""
        self._install(own)
        self._called(own, self._short())  # the first call is often slow
        self.restore()
        window = self._called(own, self._short())
        self._batch_s = (window.begun_s + window.window_s) / window.drawn
        if window.was_cut:
            self._most = max(LEAST_BATCHES, block_length(self._batch_s, block_s=self._block_s))
        else:
            self.epoch = window.longest

    def enter(self, one: LoaderWay) -> None:
        loader = self._install(one)
        if one.settings.num_workers:  # a worker starts in under two seconds
            loader.timeout = max(loader.timeout, 0.5 * self._budget_s, 2.0)
        self.restore()
        self._called(one, self._short() if self._most else BatchWindow(self._device))

    def _short(self) -> BatchWindow:
        until_s = clock.now() + max(WHOLE * self._block_s, 0.25)  # even with a small budget
        return BatchWindow(self._device, until_s=until_s)

    def _install(self, one: LoaderWay) -> DataLoader[Any]:
        loader = one.loader = loader_settings.rebuilt(self._loader, one.settings)
        if not loader_settings.is_iterable(loader):
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            loader.__dict__[name] = Skipping(loader_settings.index_sampler(loader))
        return loader

    def block(self, one: LoaderWay, number: int) -> tuple[float, float]:
        """Time a loader in round `number`; return seconds per batch of the step, and of waiting."""
        self.restore()
        window = self._called(one, self._window(one, number))
        if window.was_left and not window.was_cut and window.longest < self.epoch:
            self.epoch = window.longest  # the loop ended before its window closed
            return self.block(one, number)
        if not window.timed:
            raise StepError(NO_LOOP)
        step_s = (window.window_s - window.waited_s) / window.timed
        return step_s, window.waited_s / window.timed + window.begun_s / self.epoch

    def _window(self, one: LoaderWay, number: int) -> BatchWindow:
        """Return a round's window, the same for each loader, and let samplers skip to it."""
        if not self._most:
            return BatchWindow(self._device)
        workers, loader = one.settings.num_workers, one.loader
        last = max(self.epoch - max(self._most, MOST_WORKERS), 0)
        least = min(MOST_WORKERS + 1, last)
        first = least + number * self._most % (last + 1 - least)
        most = min(max(self._most, workers), self.epoch - first)
        if loader_settings.is_iterable(loader):
            lead = min(2, last)
        else:
            # After this many batches, workers are as busy as in the middle of an epoch.
            lead = min(first, workers + 1 if workers else 0)
            loader_settings.index_sampler(loader).number = first - lead
        until_s = clock.now() + WHOLE * max(self._block_s, (most + lead) * self._batch_s)
        return BatchWindow(self._device, lead, most, until_s)

    def _called(self, one: LoaderWay, window: BatchWindow) -> BatchWindow:
        with loader_settings.begun_with(self._loader, partial(window.batches, one.loader)):
            with self._step.around_blocks(), suppress(WindowClosed):
                self._step.call(self._context)
            if not window.drawn:
                raise StepError(NO_LOOP)
            window.close()
        return window
