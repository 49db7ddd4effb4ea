"""The user's step with the batches of a candidate, timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.data import loader_settings as settings
from speedkit_jupyter.extras.data.loader_race import LoaderCandidate
from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.plans.applying import in_force_or_none
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.shuffled_rounds import block_length
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue.interrupts import held_back
from speedkit_jupyter.torchglue.modules import end_workers
from speedkit_jupyter.torchglue.samples import EMPTY

# A window of batches takes about WINDOW_S, which evens out how workers deliver, or less where the
# budget is to have room for ROUNDS of CANDIDATES.
# Calls of up to WHOLE blocks, and at least of WHOLE_S, are timed whole; of longer ones a window of
# LEAST batches or more.
WINDOW_S, ROUNDS, CANDIDATES, WHOLE, WHOLE_S, LEAST = 0.3, 12, 4, 3, 0.25, 2
# A worker that gives nothing for STUCK_S, or for the time of STUCK batches, is stuck; none is
# waited for longer than this share of the budget, if that is long enough to start one.
STUCK_S, STUCK, STUCK_SHARE, STARTING_S = 10.0, 50, 0.5, 2.0
# A window does not begin before every candidate's workers can be at work.
MOST_WORKERS = 32
# Of a data set without a length an epoch is taken to be this long, in batches.
LONG_EPOCH = 1000
NO_LOOP = (
    "the step never goes through this loader: give a function with a loop over it, or one that "
    "takes a batch"
)
END = object()


class WindowClosed(BaseException):
    """Ends a call of the step once the batches of its window were timed.

    No Exception, so that the step does not catch it. A loop that simply ended early would be
    noticed: by `zip(loader, loader, strict=True)`, say.
    """


@dataclass
class Skipping:
    """A sampler that leaves the first `number` out."""

    sampler: Any
    number: int = 0

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self.number, None)


@dataclass
class Draw:
    """The batches that one block draws: `lead` that are not timed, then a window of up to `most`.

    The window opens when its first batch is asked for, and closes when the loop asks for one more,
    or with the block. `waited_s` is the waiting within it, `begun_s` what starting epochs took,
    `taken_s` the whole call. `longest` is how many batches one loop got, `was_left` whether a loop
    was left before its end, `was_cut` whether the window's end ended the call.
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
        """Give the batches for one loop of the user's."""
        begun_s = clock.now()
        with held_back():  # no worker is left half started
            # A subclass's own is in the user's loop already.
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
        if self.timed >= self.most or (self.timed >= LEAST and clock.now() > self.until_s):
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
    """Times candidates for one loader, with a step that is isolated.

    A block is one call of the step, which begins in the same state, and so with the same batches.
    Of a long call a window of batches is timed, which moves on with each round.
    """

    def __init__(
        self,
        step: Step,
        loader: DataLoader[Any],
        device: torch.device,
        budget_s: float,
        restore: Callable[[], object],
    ) -> None:
        self._step, self._loader, self._device = step, loader, device
        self._budget_s, self.restore = budget_s, restore
        self._context: Any = in_force_or_none(step.models)
        # Batches in a window; None where calls are timed whole.
        self._window: int | None = None
        self._block_s = min(WINDOW_S, budget_s / (ROUNDS * CANDIDATES))
        self._batch_s = 0.0
        # How many batches an epoch has, or a loop takes before it is left.
        self.epoch = settings.length(loader) or LONG_EPOCH

    def begin(self, own: LoaderCandidate) -> None:
        """Run the user's own loader, whose errors are the user's, and see how long a call takes."""
        self._install(own)
        draw = self._called(own, self._short())
        if draw.was_cut:  # the first call is often slow
            self.restore()
            draw = self._called(own, self._short())
        self._batch_s = draw.taken_s / draw.drawn
        if draw.was_cut:
            self._window = max(LEAST, block_length(self._batch_s, block_s=self._block_s))
        else:
            self.epoch = draw.longest

    def enter(self, one: LoaderCandidate) -> None:
        """Make its loader, and draw batches."""
        loader = self._install(one)
        if one.settings.num_workers:
            most_s = max(STUCK_SHARE * self._budget_s, STARTING_S)
            stuck_s = min(max(STUCK_S, STUCK * self._batch_s), most_s)
            loader.timeout = max(loader.timeout, stuck_s)
        self.restore()
        self._called(one, Draw(self._device) if self._window is None else self._short())

    def _short(self) -> Draw:
        """Return what a call gets that may not take too long."""
        return Draw(self._device, until_s=clock.now() + max(WHOLE * self._block_s, WHOLE_S))

    def _install(self, one: LoaderCandidate) -> DataLoader[Any]:
        loader = one.loader = settings.rebuilt(self._loader, one.settings)
        if not settings.is_iterable(loader):
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            loader.__dict__[name] = Skipping(settings.index_sampler(loader))
        return loader

    def block(self, one: LoaderCandidate, number: int) -> tuple[float, float]:
        """Return the seconds of a batch's step, and of waiting for it, in the round `number`."""
        self.restore()
        if self._window is None:
            draw = self._called(one, Draw(self._device))
            self.epoch = max(self.epoch, draw.longest)
            waited_s = draw.waited_s + draw.begun_s
            return (draw.taken_s - waited_s) / draw.drawn, waited_s / draw.drawn
        draw = self._timed_window(one, number, self._window)
        if draw.was_left and not draw.was_cut and draw.longest < self.epoch:
            self.epoch = draw.longest  # the loop is left before its window closes
            self.restore()
            draw = self._timed_window(one, number, self._window)
        if not draw.timed:
            raise StepError(NO_LOOP)
        step_s = (draw.window_s - draw.waited_s) / draw.timed
        return step_s, draw.waited_s / draw.timed + draw.begun_s / self.epoch

    def _timed_window(self, one: LoaderCandidate, number: int, each: int) -> Draw:
        """Time the window of a round, which begins with the same batch for every candidate.

        What comes before it is not loaded, but for one batch a worker, and one more: then they are
        at work as they are in the middle of an epoch.
        """
        workers, loader = one.settings.num_workers, one.loader
        assert loader is not None
        last = max(self.epoch - max(each, MOST_WORKERS), 0)
        least = min(MOST_WORKERS + 1, last)
        first = least + number * each % (last + 1 - least)
        most = min(max(each, workers), self.epoch - first)
        if settings.is_iterable(loader):
            lead = min(2, last)
        else:
            lead = min(first, workers + 1 if workers else 0)
            settings.index_sampler(loader).number = first - lead
        until_s = clock.now() + WHOLE * max(self._block_s, (most + lead) * self._batch_s)
        return self._called(one, Draw(self._device, lead, most, until_s))

    def _called(self, one: LoaderCandidate, draw: Draw) -> Draw:
        """Call the step; its loops over the user's loader get a candidate's batches."""
        assert one.loader is not None
        with settings.begun_with(self._loader, partial(draw.batches, one.loader)):
            synchronize(self._device)
            begun_s = clock.now()
            with self._step.around_blocks(), suppress(WindowClosed):
                self._step.call(self._context)
            if not draw.drawn:
                raise StepError(NO_LOOP)
            draw.close()
            draw.taken_s = clock.now() - begun_s
            return draw
