"""Other settings of a loader in shuffled rounds, each with the user's own step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import median
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.data import loader_settings
from speedkit_jupyter.extras.data.loader_settings import LoaderSettings
from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.plans.applying import in_force_or_none
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.shuffled_rounds import block_length
from speedkit_jupyter.rounds.statistics import ERROR, PRECISE, Ratio, paired_ratio
from speedkit_jupyter.rounds.timeit_run import device_of
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue.interrupts import held_back
from speedkit_jupyter.torchglue.modules import end_workers
from speedkit_jupyter.torchglue.samples import EMPTY

T = TypeVar("T")
# A way leaves after a number of rounds if its median is this many times the fastest median: three
# rounds waver by a third, eight by a tenth.
SLOWER = ((3, 1.5), (8, 1.15))
# An interval that decides needs LEAST rounds; more than MOST tell nothing that matters.
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
TIMED_OUT = re.compile(r"DataLoader timed out after ([\d.]+) seconds")
NO_LOOP = (
    "the step never goes through this loader: give a function with a loop over it, or one that "
    "takes a batch"
)
END = object()


@dataclass(eq=False)
class LoaderWay:
    """One way to load.

    `times_s` are the seconds of a batch and its step by round, `waits_s` the waiting in them. The
    reason `why_out` or the error `failure` ended its race.
    """

    settings: LoaderSettings
    times_s: dict[int, float] = field(default_factory=dict)
    waits_s: dict[int, float] = field(default_factory=dict)
    why_out: str = ""
    failure: str = ""
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
        """End the workers."""
        loader, self.loader = self.loader, None
        if loader is not None:
            loader_settings.end_workers(loader)


@dataclass
class LoaderRace:
    """A race of `ways`; the first one is the user's own, and never leaves.

    `block` times a way in a round: the seconds of a batch's step, and of waiting for the batch.
    """

    ways: list[LoaderWay]
    block: Callable[[LoaderWay, int], tuple[float, float]]
    rounds: int = 0
    _stuck: str = ""

    @property
    def own(self) -> LoaderWay:
        return self.ways[0]

    @property
    def racing(self) -> list[LoaderWay]:
        return [one for one in self.ways if not (one.why_out or one.failure)]

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
        fastest_s = self._fastest.batch_s
        for one in self.racing[1:]:
            allowed = [times for rounds, times in SLOWER if len(one.times_s) >= rounds]
            if allowed and one.batch_s > allowed[-1] * fastest_s:
                one.leave(f"{one.batch_s / fastest_s:.2f} times the fastest's time")

    def _attempt(self, one: LoaderWay, call: Callable[[], T]) -> T | None:
        """Make a call for a way, which leaves if the call fails.

        After a way whose workers were stuck no others with workers are tried: each would be waited
        for as long.
        """
        if self._stuck and one.settings.num_workers and one is not self.own:
            one.leave(f"not tried: {self._stuck}")
            return None
        try:
            return call()
        except Exception as error:
            if one is self.own:  # its errors are the user's
                raise
            if (found := TIMED_OUT.search(str(error))) and one.settings.num_workers:
                one.leave(f"gave no batch within {float(found[1]):.3g} s")
                self._stuck = f"{one.settings.words} {one.why_out}"
                return None
            # The last line of an error in a worker names its class already.
            kind, line = type(error).__name__, str(error).strip().rpartition("\n")[2].strip()
            one.failure = line if line.startswith(f"{kind}:") else f"{kind}: {line}"
            one.close()
            return None

    @property
    def _fastest(self) -> LoaderWay:
        return min(self.racing, key=lambda one: one.batch_s)

    def best(self) -> LoaderWay:
        """Return the fastest by median; of ways within 0.5 % of it, the first."""
        return next(one for one in self.racing if one.batch_s <= 1.005 * self._fastest.batch_s)

    def proven(self) -> LoaderWay:
        """Return the best way if it is proven faster than the user's own, by GAIN or more."""
        best = self.best()
        ratio = None if best is self.own else self.ratio(best)
        is_faster = ratio is not None and ratio.low > 1 and ratio.median >= GAIN
        return best if is_faster else self.own

    def rival(self) -> LoaderWay | None:
        return min(self.racing[1:], key=lambda one: one.batch_s, default=None)

    def narrow(self, rival: LoaderWay | None) -> None:
        """Let only the rival and the user's own go on."""
        for one in self.racing[1:]:
            if one is not rival:
                one.leave("not the fastest by median" if one.times_s else "no time was left for it")

    def ratio(self, one: LoaderWay, baseline: LoaderWay | None = None) -> Ratio | None:
        """Return the speed-up of a way over the baseline, by default the user's own."""
        other = baseline or self.own
        shared = sorted(one.times_s.keys() & other.times_s.keys())
        if not shared:
            return None
        before, now = ([each.times_s[at] for at in shared] for each in (other, one))
        return paired_ratio(before, now, ERROR / max(len(self.ways) - 1, 1))

    def is_settled(self) -> bool:
        """Return whether more rounds would tell nothing that matters."""
        rounds = min(len(one.times_s) for one in self.racing)
        if not LEAST <= rounds < MOST:
            return rounds >= MOST
        best = self.best()
        ratios = [self.ratio(best, other) for other in self.racing if other is not best]
        return all(one is not None and one.settled and one.is_precise(PRECISE) for one in ratios)


class WindowClosed(BaseException):
    """Ends a call of the step after the batches of its window.

    No Exception, so that the step does not catch it. A loop that ended early would be noticed, by
    `zip(loader, loader, strict=True)` for example.
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
    it, or with the block. `waited_s` is the waiting in it, `begun_s` the time to start epochs,
    `taken_s` the whole call. `longest` is the most batches of one loop, `was_left` says whether a
    loop was left before its end, `was_cut` whether the window ended the call.
    """

    device: torch.device
    lead: int = 0
    most: float = math.inf
    until_s: float = math.inf
    drawn: int = 0
    timed: int = 0
    waited_s: float = 0.0
    begun_s: float = 0.0
    taken_s: float = 0.0
    longest: int = 0
    was_left: bool = False
    was_cut: bool = False
    opened_s: float | None = None
    window_s: float = 0.0

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the batches of one loop of the user's."""
        begun_s = clock.now()
        with held_back():  # no worker is left half started
            # The __iter__ of a subclass is in the user's loop already.
            iterator = DataLoader.__iter__(loader)
        self.begun_s += clock.now() - begun_s
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
        """Note the length of the window."""
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
        self._window: int | None = None  # batches in a window; None where calls are timed whole
        self._block_s = min(WINDOW_S, budget_s / (12 * 4))
        self._batch_s = 0.0
        # The batches of an epoch (a thousand if it is unknown), or of a loop that is left before.
        self.epoch = loader_settings.length(loader) or 1000

    def begin(self, own: LoaderWay) -> None:
        """Run the user's own loader, whose errors are the user's, and time a call."""
        self._install(own)
        window = self._called(own, self._short())
        if window.was_cut:  # the first call is often slow
            self.restore()
            window = self._called(own, self._short())
        self._batch_s = window.taken_s / window.drawn
        if window.was_cut:
            self._window = max(LEAST_BATCHES, block_length(self._batch_s, block_s=self._block_s))
        else:
            self.epoch = window.longest

    def enter(self, one: LoaderWay) -> None:
        """Make the loader of a way, and draw batches."""
        loader = self._install(one)
        if one.settings.num_workers:  # two seconds are enough to start a worker
            loader.timeout = max(loader.timeout, 0.5 * self._budget_s, 2.0)
        self.restore()
        self._called(one, BatchWindow(self._device) if self._window is None else self._short())

    def _short(self) -> BatchWindow:
        """Return the window of a call that may not take long."""
        until_s = clock.now() + max(WHOLE * self._block_s, 0.25)  # also under a small budget
        return BatchWindow(self._device, until_s=until_s)

    def _install(self, one: LoaderWay) -> DataLoader[Any]:
        loader = one.loader = loader_settings.rebuilt(self._loader, one.settings)
        if not loader_settings.is_iterable(loader):
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            loader.__dict__[name] = Skipping(loader_settings.index_sampler(loader))
        return loader

    def block(self, one: LoaderWay, number: int) -> tuple[float, float]:
        """Return the seconds of a batch's step, and of waiting for it, in the round `number`."""
        self.restore()
        if self._window is None:
            window = self._called(one, BatchWindow(self._device))
            self.epoch = max(self.epoch, window.longest)
            waited_s = window.waited_s + window.begun_s
            return (window.taken_s - waited_s) / window.drawn, waited_s / window.drawn
        window = self._timed_window(one, number, self._window)
        if window.was_left and not window.was_cut and window.longest < self.epoch:
            self.epoch = window.longest  # the loop is left before its window closes
            self.restore()
            window = self._timed_window(one, number, self._window)
        if not window.timed:
            raise StepError(NO_LOOP)
        step_s = (window.window_s - window.waited_s) / window.timed
        return step_s, window.waited_s / window.timed + window.begun_s / self.epoch

    def _timed_window(self, one: LoaderWay, number: int, each: int) -> BatchWindow:
        """Time the window of a round, which begins with the same batch for every way.

        Batches before it are not loaded, except one for each worker and one more: then workers are
        as busy as in the middle of an epoch.
        """
        workers, loader = one.settings.num_workers, one.loader
        assert loader is not None
        last = max(self.epoch - max(each, MOST_WORKERS), 0)
        least = min(MOST_WORKERS + 1, last)
        first = least + number * each % (last + 1 - least)
        most = min(max(each, workers), self.epoch - first)
        if loader_settings.is_iterable(loader):
            lead = min(2, last)
        else:
            lead = min(first, workers + 1 if workers else 0)
            loader_settings.index_sampler(loader).number = first - lead
        until_s = clock.now() + WHOLE * max(self._block_s, (most + lead) * self._batch_s)
        return self._called(one, BatchWindow(self._device, lead, most, until_s))

    def _called(self, one: LoaderWay, window: BatchWindow) -> BatchWindow:
        """Call the step; its loops over the user's loader get the batches of a way."""
        assert one.loader is not None
        with loader_settings.begun_with(self._loader, partial(window.batches, one.loader)):
            synchronize(self._device)
            begun_s = clock.now()
            with self._step.around_blocks(), suppress(WindowClosed):
                self._step.call(self._context)
            if not window.drawn:
                raise StepError(NO_LOOP)
            window.close()
            window.taken_s = clock.now() - begun_s
            return window
