"""The batches of one candidate, given to the user's loop in stretches that are timed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.loading.copies import on_its_way
from speedkit_jupyter.loading.obstacles import is_iterable
from speedkit_jupyter.loading.tuned_loader import end_those_of, end_workers
from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.samples import EMPTY

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

# Workers get so long to load ahead all that they may, before another candidate is timed.
IDLE_S, LOOK_S = 3.0, 0.002


@dataclass
class Stream:
    """Batches of a loader, epoch after epoch. `begins_s` are the seconds from the start of an epoch
    to its first batch; `epoch` is how many batches one has, once that was seen.
    """

    loader: DataLoader[Any]
    begins_s: list[float] = field(default_factory=list)
    epoch: int | None = None
    _iterator: Any = None
    _drawn: int = 0

    def next(self) -> tuple[Any, float]:
        """A batch, and the seconds of them that beginning an epoch took."""
        device = self.loader.__dict__.get("_copied_to") or ""
        if self._iterator is not None:
            try:
                batch = next(self._iterator)
                self._drawn += 1
            except StopIteration:
                self.epoch, self._iterator = self._drawn, None
            else:
                return on_its_way(batch, device), 0.0
        begun_s = clock.now()
        self._iterator = _begun(self.loader)
        try:
            batch = on_its_way(next(self._iterator), device)
        except StopIteration:
            raise StepError(EMPTY) from None
        self.begins_s.append(clock.now() - begun_s)
        self._drawn = 1
        return batch, self.begins_s[-1]

    def left_of(self, epoch: int) -> int:
        """How many of an epoch's batches are to come before another begins."""
        return 0 if self._iterator is None else max(epoch - self._drawn, 0)

    def left(self) -> None:
        """The loop was left: another one begins another epoch."""
        if not self.loader.persistent_workers:
            end_those_of(self._iterator)
        self._iterator = None

    def wait(self) -> None:
        """Until its workers have nothing to do."""
        queue = getattr(self._iterator, "_data_queue", None)
        # At its end an iterable leaves tasks open that nobody answers any more.
        until_s = clock.now() + (LOOK_S * 10 if is_iterable(self.loader) else IDLE_S)
        while queue is not None and clock.now() < until_s:
            try:
                waiting = queue.qsize()
            except NotImplementedError:  # macOS
                waiting = 0
            if waiting >= self._iterator._tasks_outstanding:
                return
            time.sleep(LOOK_S)

    def close(self) -> None:
        """No worker of it is left."""
        iterator, self._iterator = self._iterator, None
        end_those_of(iterator)
        end_workers(self.loader)


def _begun(loader: DataLoader[Any]) -> Any:
    """torch's own iterator: what a subclass adds, the user's loop goes through already."""
    from torch.utils.data import DataLoader

    return DataLoader.__iter__(loader)


@dataclass
class Stretch:
    """`lead` batches that are not timed, then `number` that are; over as many loops as that takes.

    A loop gets one batch at least, and up to `per_loop`; after `longest_s` the timed ones may be
    fewer. `seconds` are those of the `timed` ones, what the step does with them and waiting for
    them together, without the `begun_s` that beginning epochs took; `waited_s` of them were spent
    on waiting. Where they go `to_the_end` of a call, what it does after its loop counts, too.
    `left_after` is how many batches the shortest loop took, where one was left before its end.
    """

    stream: Stream
    device: torch.device
    lead: int
    number: int
    longest_s: float = math.inf
    per_loop: float = math.inf
    to_the_end: bool = False
    seconds: float = 0.0
    waited_s: float = 0.0
    begun_s: float = 0.0
    drawn: int = 0
    timed: int = 0
    left_after: int | None = None
    _loop: object = None
    _left_before: int | None = None
    _since_s: float | None = None
    _until_s: float = math.inf

    @property
    def is_over(self) -> bool:
        """Whether all were given, or it took long enough."""
        return self.timed >= self.number or (self.timed > 0 and clock.now() > self._until_s)

    def batches(self) -> Iterator[Any]:
        """For one loop of the user's."""
        given, ended = 0, False
        self._loop, self._left_before = (loop := object()), self.left_after
        try:
            while not given or not (self.is_over or given >= self.per_loop):
                batch = self._next()
                given += 1
                yield batch
            ended = True
        finally:
            if loop is self._loop:
                if not self.to_the_end:
                    self.pause()
                if not ended and not self.is_over:
                    self.left_after = min(given, self.left_after or given)
                    self.stream.left()

    def give_up(self) -> None:
        """The loop that goes through it has failed, and was not left. Its generator has ended with
        it, or may do so when another loop goes on already.
        """
        self._loop, self.left_after = None, self._left_before
        self.pause()
        self.stream.left()

    def _next(self) -> Any:
        is_timed = self.drawn >= self.lead and not self.is_over
        if is_timed and self._since_s is None:
            synchronize(self.device)
            self._since_s = clock.now()
            self._until_s = min(self._until_s, self._since_s + self.longest_s)
        asked_s = clock.now()
        batch, begin_s = self.stream.next()
        if is_timed and self._since_s is not None:
            self._since_s += begin_s
            self.begun_s += begin_s
            self.waited_s += clock.now() - asked_s - begin_s
        self.drawn += 1
        self.timed += is_timed
        return batch

    def pause(self) -> None:
        """At the end of a loop, or of a call that ends within one; another one goes on."""
        if self._since_s is not None:
            synchronize(self.device)
            self.seconds += clock.now() - self._since_s
            self._since_s = None
