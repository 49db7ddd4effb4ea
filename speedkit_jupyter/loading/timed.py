"""The user's step with the batches of a candidate: so many, timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.loading.candidate import TIMED_OUT, Candidate
from speedkit_jupyter.loading.kept import KeptSome
from speedkit_jupyter.loading.obstacles import length
from speedkit_jupyter.loading.samples import Samples
from speedkit_jupyter.loading.stream import Stream, Stretch
from speedkit_jupyter.loading.tuned_loader import rebuilt
from speedkit_jupyter.measure.rounds.confinement import patched
from speedkit_jupyter.measure.subject.repeats import ended
from speedkit_jupyter.measure.subject.step import OUT_OF_DATA, Step
from speedkit_jupyter.plans.applying import in_force_or_none
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.tracebacks import door

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

# A timed stretch takes about so long where the budget has room for the rounds that decide; of what
# is slower than the user's own up to so many times as long. An epoch of up to so many of them is
# timed whole: at its end nothing is loaded ahead any more, and the step has the cores.
STRETCH_S, LEAST_BATCHES, ROUNDS, LONGEST, WHOLE = 0.15, 2, 12, 3, 2
# A worker that gives nothing for so long, or for so many batches' time, is stuck; but none is
# waited for longer than this share of the budget, if that is long enough to start one.
STUCK_S, STUCK, STUCK_SHARE, STARTING_S = 10.0, 50, 0.5, 2.0
NO_LOOP = (
    "the step never goes through this loader: give a function with a loop over it, or one that "
    "takes a batch"
)


class Timed:
    """Times candidates for one loader, with a step that is isolated.

    `batch_s` are about the seconds of a batch and its step. Where the step leaves its loop before
    the end of an epoch, `left_after` is how many batches it took at the least.
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
        self._budget_s = budget_s
        self._stretch: Stretch | None = None
        self._context: Any = in_force_or_none(step.models)
        self._restore, self._is_settled, self._per_loop = restore, True, math.inf
        self._has_run = False
        self.batch_s = 0.0
        self.left_after: int | None = None

    def installed(self) -> AbstractContextManager[None]:
        """In the block loops over the user's loader get the batches that are measured."""
        from torch.utils.data import DataLoader

        return patched(DataLoader, "__iter__", self._instead)

    def begin(self, own: Candidate) -> None:
        """The user's own loader, whose errors are the user's."""
        __tracebackhide__ = True
        own.stream = Stream(rebuilt(self._loader, own.settings))
        self.draw(own, 1)
        self.batch_s = self.draw(own, LEAST_BATCHES).seconds / LEAST_BATCHES

    def enter(self, one: Candidate, seen: Samples) -> None:
        """Its first batch; samples that are kept are there already."""
        __tracebackhide__ = True
        loader = rebuilt(self._loader, one.settings)
        if one.settings.num_workers:
            loader.timeout = max(loader.timeout, self._stuck_s) if loader.timeout else self._stuck_s
        if one.settings.kept:
            some = KeptSome(self._loader.dataset, one.settings.kept, seen.keys)
            loader.__dict__["dataset"] = some
        one.stream = Stream(loader)
        self.draw(one, 1)

    @property
    def _stuck_s(self) -> float:
        most_s = max(STUCK_SHARE * self._budget_s, STARTING_S)
        return min(max(STUCK_S, STUCK * self.batch_s), most_s)

    def epoch(self, own: Candidate) -> int | None:
        """How many batches an epoch has, as far as was seen."""
        return self.left_after or (None if own.stream is None else own.stream.epoch)

    def block(self, one: Candidate, number: int, epoch: int) -> None:
        """One candidate in the round of this number, where an epoch has so many batches."""
        __tracebackhide__ = True
        assert one.stream is not None
        whole = 1 < epoch <= WHOLE * self._batches
        batches, lead, longest_s = self._batches, one.settings.ahead + 1, LONGEST * STRETCH_S
        if whole:
            if self.left_after:  # a loop takes no rest of an epoch either
                one.stream.left()
            batches, lead, longest_s = epoch, one.stream.left_of(epoch), WHOLE * longest_s
        stretch = self.draw(one, batches, lead, longest_s, to_the_end=whole or epoch == 1)
        one.stream.wait()
        step_s = (stretch.seconds - stretch.waited_s) / stretch.timed
        if epoch == 1:  # each begins one
            waited_s = (stretch.waited_s + stretch.begun_s) / stretch.timed
        else:  # the first of an epoch waits for its beginning, which is told apart
            waited_s = stretch.waited_s / max(stretch.timed - whole, 1)
        one.times_s[number] = step_s + waited_s
        one.waits_s.append(waited_s)

    def draw(
        self,
        one: Candidate,
        number: int,
        lead: int = 0,
        longest_s: float = math.inf,
        to_the_end: bool = False,
    ) -> Stretch:
        """So many batches of a candidate, after some that are not timed. Raises StepError where
        the step does not go through the loader.
        """
        __tracebackhide__ = True
        assert one.stream is not None
        stretch = self._stretch = Stretch(
            one.stream, self._device, lead, number, longest_s, self._per_loop, to_the_end
        )
        try:
            while not stretch.is_over:
                before = stretch.drawn
                with _threads(one.threads), self._step.around_blocks():
                    self._run(one)
                stretch.pause()
                if stretch.drawn == before:
                    raise StepError(NO_LOOP)
        finally:
            self._stretch = None
        one.begins_s = one.stream.begins_s
        left = [number for number in (stretch.left_after, self.left_after) if number]
        self.left_after = min(left, default=None)
        return stretch

    @door
    def _run(self, one: Candidate) -> None:
        """Once; where so many calls in a row can't be made, or so long ones (a schedule has so many
        steps), from the state of before, with an epoch in each.
        """
        __tracebackhide__ = True
        if not math.isinf(self._per_loop) and not self._is_settled:
            self.settle()
        was_settled, self._is_settled = self._is_settled, False
        try:
            self._step.run(self._context)
        except StopIteration:  # would look like the end of a generator of ours
            if self._stretch is None or not self._stretch.is_over:
                raise StepError(OUT_OF_DATA) from None
            self._has_run = True  # it asks for a number of batches, and has had enough of them
            return
        except StepError:
            raise
        except Exception as error:
            again = not self._has_run or (was_settled and not math.isinf(self._per_loop))
            if again or (one.settings.num_workers and TIMED_OUT.search(str(error))):
                raise
            said = ended(error).line
        else:
            self._has_run = True
            return
        self._run_anew()
        self._step.tell([said])

    def _run_anew(self) -> None:
        """Once, from the state of before; as all later ones, unless that fails as well."""
        __tracebackhide__ = True
        before, stretch = self._per_loop, self._stretch
        self._per_loop = length(self._loader) or self._per_loop
        if stretch is not None:
            stretch.give_up()
            stretch.per_loop = self._per_loop
        self.settle()
        self._is_settled = False
        try:
            self._step.run(self._context)
        except BaseException:
            self._per_loop = before
            raise

    def settle(self) -> None:
        """All that the step changed is put back."""
        self._restore()
        self._is_settled = True

    def _instead(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(asked: DataLoader[Any]) -> Any:
            if asked is not self._loader or self._stretch is None:
                return original(asked)
            return self._stretch.batches()

        return call

    @property
    def _batches(self) -> int:
        """How many a timed stretch has."""
        room_s = self._budget_s / (ROUNDS * 4)
        wanted = min(STRETCH_S, room_s) / max(self.batch_s, 1e-6)
        return max(LEAST_BATCHES, math.ceil(wanted))


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number is not None:
            torch.set_num_threads(before)
