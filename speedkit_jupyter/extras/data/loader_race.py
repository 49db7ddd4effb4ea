"""Times loaders with different settings in shuffled rounds, each with the user's own step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.data import loaders
from speedkit_jupyter.extras.data.loaders import LoaderSettings
from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.plans.applying import in_force_or_none
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.shuffled_rounds import block_length
from speedkit_jupyter.rounds.statistics import ERROR, PRECISE, Ratio, paired_ratio
from speedkit_jupyter.rounds.timing import device_of
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue.interrupts import held_back
from speedkit_jupyter.torchglue.modules import end_workers
from speedkit_jupyter.torchglue.samples import EMPTY

# (rounds, factor): a way leaves after these rounds if its median is this factor above the fastest.
# Medians of three rounds vary by a third, of eight rounds by a tenth.
SLOWER = ((3, 1.5), (8, 1.15))
# Rounds of a race: fewer give no interval, more make none of use narrower.
LEAST, MOST = 8, 100
# A gain below 2 % is not worth another loader.
GAIN = 1.02
# A window of batches takes WINDOW_S, which evens out how workers deliver, or less if the budget has
# no room for 12 rounds of 4 ways. Calls of up to WHOLE windows are timed whole; of longer calls a
# window of LEAST_BATCHES or more is timed.
WINDOW_S, WHOLE, LEAST_BATCHES = 0.3, 3, 2
# A window begins where every way's workers are at work, up to this number of workers.
MOST_WORKERS = 32
# Source: torch/utils/data/dataloader.py, which raises a plain RuntimeError.
TIMED_OUT = re.compile(r"DataLoader timed out")
NO_LOOP = (
    "the step never goes through this loader: give a function with a loop over it, or one that "
    "takes a batch"
)
END = object()


@dataclass(eq=False)
class LoaderWay:
    """A loader with its settings, and the reason `why_out` for leaving the race, or nothing.

    `times_s` are the seconds of a batch and its step by round, `waits_s` the waiting in them.
    """

    settings: LoaderSettings
    times_s: dict[int, float] = field(default_factory=dict)
    waits_s: dict[int, float] = field(default_factory=dict)
    why_out: str = ""
    loader: DataLoader[Any] | None = field(default=None, repr=False)

    @property
    def batch_s(self) -> float:
        """Return the median seconds of a batch; infinite before any round."""
        return median(self.times_s.values()) if self.times_s else math.inf

    @property
    def waiting(self) -> float:
        """Return the share of the time that is waiting for batches, 0 to 1."""
        total_s = sum(self.times_s.values())
        return sum(self.waits_s.values()) / total_s if total_s else 0.0

    def leave(self, why: str) -> None:
        self.why_out = why
        self.close()

    def close(self) -> None:
        if self.loader is not None:
            loaders.end_workers(self.loader)


@dataclass
class LoaderRace:
    """A race of `ways`; the first one is the user's own, and never leaves.

    `block` returns the seconds of a batch's step, and of waiting for it, of a way in a round.
    """

    ways: list[LoaderWay]
    block: Callable[[LoaderWay, int], tuple[float, float]]
    rounds: int = 0
    _are_workers_stuck: bool = False

    @property
    def own(self) -> LoaderWay:
        return self.ways[0]

    @property
    def racing(self) -> list[LoaderWay]:
        return [one for one in self.ways if not one.why_out]

    def admit(self, more: Iterable[LoaderSettings], enter: Callable[[LoaderWay], object]) -> None:
        """Add ways to the race; `enter` makes the first batches of each."""
        for one in map(LoaderWay, more):
            self.ways.append(one)
            self._attempt(one, partial(enter, one))

    def round(self, order: Sequence[LoaderWay]) -> Iterator[LoaderWay]:
        """Time each way once, in this order; yield after each."""
        blocks = dict[LoaderWay, tuple[float, float]]()
        for one in order:
            block = self._attempt(one, partial(self.block, one, self.rounds))
            if block is not None:
                blocks[one] = block
            yield one
        mine = self.own.settings
        for one, (step_s, wait_s) in blocks.items():
            # A loader changes the waiting, and the step only if batches come from other memory, or
            # if fewer workers take its cores.
            settings = one.settings
            if settings.pin_memory == mine.pin_memory and settings.num_workers >= mine.num_workers:
                step_s = max(step_s, blocks[self.own][0])
            one.times_s[self.rounds], one.waits_s[self.rounds] = step_s + wait_s, wait_s
        self.rounds += 1
        fastest_s = self.fastest.batch_s
        for one in self.racing[1:]:
            allowed = [times for rounds, times in SLOWER if len(one.times_s) >= rounds]
            if allowed and one.batch_s > allowed[-1] * fastest_s:
                one.leave(f"{one.batch_s / fastest_s:.2f} times the fastest's time")

    def _attempt(self, one: LoaderWay, call: Callable[[], Any]) -> Any:
        """Make a call for a way, which leaves if the call fails.

        After a timeout no other workers are tried: each would be waited for again.
        """
        has_workers = one.settings.num_workers > 0
        if self._are_workers_stuck and has_workers and one is not self.own:
            one.leave("not tried: other workers gave no batch")
            return None
        try:
            return call()
        except Exception as error:
            if one is self.own:  # its errors are the user's
                raise
            self._are_workers_stuck |= has_workers and bool(TIMED_OUT.search(str(error)))
            # The last line of an error in a worker names its class already.
            kind, line = type(error).__name__, str(error).strip().rpartition("\n")[2].strip()
            one.leave(line if line.startswith(f"{kind}:") else f"{kind}: {line}")
            return None

    @property
    def fastest(self) -> LoaderWay:
        return min(self.racing, key=lambda one: one.batch_s)

    def proven(self) -> LoaderWay:
        """Return the best way if it is proven faster than the user's own, by GAIN or more."""
        best = self.fastest
        ratio = None if best is self.own else self.ratio(best)
        is_faster = ratio is not None and ratio.low > 1 and ratio.median >= GAIN
        return best if is_faster else self.own

    def ratio(self, one: LoaderWay) -> Ratio | None:
        """Return the speed-up of a way over the user's own."""
        shared = sorted(one.times_s.keys() & self.own.times_s.keys())
        if not shared:
            return None
        before, now = ([each.times_s[at] for at in shared] for each in (self.own, one))
        return paired_ratio(before, now, ERROR / max(len(self.ways) - 1, 1))

    def is_settled(self) -> bool:
        """Return whether more rounds can't change the choice."""
        rounds = min(len(one.times_s) for one in self.racing)
        if not LEAST <= rounds < MOST:
            return rounds >= MOST
        ratios = map(self.ratio, self.racing[1:])
        return all(one is not None and one.settled and one.is_precise(PRECISE) for one in ratios)


class WindowClosed(BaseException):
    """Ends a call of the step after its window; no Exception, which the step might catch.

    `zip(loader, loader, strict=True)`, for example, would notice a loop that ends early.
    """


@dataclass
class Skipping:
    """A sampler without the first `number` indices of another sampler."""

    sampler: Any
    number: int = 0

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self.number, None)


@dataclass
class BatchWindow:
    """The batches of one block: `lead` batches that are not timed, then a window of up to `most`.

    The window opens with the request for its first batch, and closes with the next request after
    it, or with the block; it lasts `window_s`, with `waited_s` of waiting. `begun_s` are the
    seconds to start epochs before it, `longest` the most batches of one loop. `was_left` is whether
    a loop was left before its end, `was_cut` whether the window ended the call.
    """

    device: torch.device
    lead: int = 0
    most: float = math.inf
    until_s: float = math.inf
    drawn: int = 0
    timed: int = 0
    waited_s: float = 0.0
    begun_s: float = 0.0
    longest: int = 0
    was_left: bool = False
    was_cut: bool = False
    opened_s: float | None = None
    window_s: float = 0.0

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the batches of one loop in the user's code."""
        begun_s = clock.now()
        with held_back():  # no worker is left half started
            # The __iter__ of a subclass is in the user's loop already.
            iterator = DataLoader.__iter__(loader)
        if self.opened_s is None:
            self.begun_s += clock.now() - begun_s
        else:
            self.waited_s += clock.now() - begun_s
        given, batch = 0, None
        try:
            while (batch := self._next(iterator)) is not END:
                given += 1
                self.longest = max(self.longest, given)
                yield batch
        finally:
            self.was_left |= batch is not END
            if not loader.persistent_workers:
                with held_back():
                    end_workers(iterator)

    def _next(self, iterator: Iterator[Any]) -> Any:
        """Return the next batch, or END."""
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
    """Times ways to load with an isolated step.

    A block is one call of the step, which begins in the same state, and so with the same batches.
    Of a long call a window of batches is timed, which moves on with each round.
    """

    def __init__(
        self, step: Step, loader: DataLoader[Any], budget_s: float, restore: Callable[[], object]
    ) -> None:
        self._step, self._loader, self._device = step, loader, device_of(step)
        self._budget_s, self.restore = budget_s, restore
        self._context: Any = in_force_or_none(step.models)
        self._most = 0  # batches of a window; 0 where calls are timed whole
        self._block_s = min(WINDOW_S, budget_s / (12 * 4))
        self._batch_s = 0.0
        # The batches of an epoch (a thousand if it is unknown), or of a loop that is left before.
        self.epoch = loaders.length(loader) or 1000

    def begin(self, own: LoaderWay) -> None:
        """Run the user's own loader, whose errors are the user's, and time a call."""
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
        """Make the loader of a way, and draw batches."""
        loader = self._install(one)
        if one.settings.num_workers:  # two seconds are enough to start a worker
            loader.timeout = max(loader.timeout, 0.5 * self._budget_s, 2.0)
        self.restore()
        self._called(one, self._short() if self._most else BatchWindow(self._device))

    def _short(self) -> BatchWindow:
        """Return the window of a call that may not take long."""
        until_s = clock.now() + max(WHOLE * self._block_s, 0.25)  # also under a small budget
        return BatchWindow(self._device, until_s=until_s)

    def _install(self, one: LoaderWay) -> DataLoader[Any]:
        loader = one.loader = loaders.rebuilt(self._loader, one.settings)
        if not loaders.is_iterable(loader):
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            loader.__dict__[name] = Skipping(loaders.index_sampler(loader))
        return loader

    def block(self, one: LoaderWay, number: int) -> tuple[float, float]:
        """Return the seconds of a batch's step, and of waiting for it, in the round `number`."""
        self.restore()
        window = self._called(one, self._window(one, number))
        if window.was_left and not window.was_cut and window.longest < self.epoch:
            self.epoch = window.longest  # the loop is left before its window closes
            self.restore()
            window = self._called(one, self._window(one, number))
        if not window.timed:
            raise StepError(NO_LOOP)
        step_s = (window.window_s - window.waited_s) / window.timed
        return step_s, window.waited_s / window.timed + window.begun_s / self.epoch

    def _window(self, one: LoaderWay, number: int) -> BatchWindow:
        """Return the window of a round, which begins with the same batch for every way.

        Batches before it are not loaded, except one for each worker and one more: then workers are
        as busy as in the middle of an epoch.
        """
        if not self._most:
            return BatchWindow(self._device)
        workers, loader = one.settings.num_workers, one.loader
        assert loader is not None
        last = max(self.epoch - max(self._most, MOST_WORKERS), 0)
        least = min(MOST_WORKERS + 1, last)
        first = least + number * self._most % (last + 1 - least)
        most = min(max(self._most, workers), self.epoch - first)
        if loaders.is_iterable(loader):
            lead = min(2, last)
        else:
            lead = min(first, workers + 1 if workers else 0)
            loaders.index_sampler(loader).number = first - lead
        until_s = clock.now() + WHOLE * max(self._block_s, (most + lead) * self._batch_s)
        return BatchWindow(self._device, lead, most, until_s)

    def _called(self, one: LoaderWay, window: BatchWindow) -> BatchWindow:
        """Call the step; its loops over the user's loader get the batches of a way."""
        assert one.loader is not None
        with loaders.begun_with(self._loader, partial(window.batches, one.loader)):
            with self._step.around_blocks(), suppress(WindowClosed):
                self._step.call(self._context)
            if not window.drawn:
                raise StepError(NO_LOOP)
            window.close()
        return window
