"""A measurement works on the user's own objects: taken, handed back for a while, put back.

Between the turns of an event loop any cell may run. So before a turn is given up the user's state
is back in place, plans, iterators and all. What a cell changes in its turn is the cell's: it stays,
and the measurement ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from speedkit_jupyter.measure.undo import audit, process, unrestorable
from speedkit_jupyter.measure.undo.concurrent_changes import refuse_changed_elsewhere
from speedkit_jupyter.measure.undo.displays import Displays
from speedkit_jupyter.measure.undo.fingerprint import Fingerprint
from speedkit_jupyter.measure.undo.handlers.names import Namespace
from speedkit_jupyter.measure.undo.iterators import Replays
from speedkit_jupyter.measure.undo.process import Settings
from speedkit_jupyter.measure.undo.repeated_warnings import RepeatedWarnings
from speedkit_jupyter.plans.applying import applied_to, hide, show
from speedkit_jupyter.support import interrupts
from speedkit_jupyter.support.exceptions import StepError

if TYPE_CHECKING:
    import torch

    from speedkit_jupyter.measure.undo.snapshot import Snapshot
    from speedkit_jupyter.measure.undo.walk import Walk

BUSY = (
    "another measurement is in progress, between the cells: stop it in its panel, or let it end, "
    "and run this again"
)
# State at module level, on purpose: all measurements share one process, its flags and its clock.
_IN_PROGRESS: list[MeasurementGuard] = []


class MeasuredStep(Protocol):
    """What a guard needs of a step: where to begin looking, and whom to tell."""

    models: Sequence[torch.nn.Module]
    names: MutableMapping[str, Any] | None
    asked: frozenset[str] | None

    def walk(self) -> Walk:
        """Return a walk over all that it can change."""

    def state(self) -> Snapshot:
        """Return a copy of what it changes, as it is now."""

    def begin(self, state: Snapshot, rewind: Callable[[], None]) -> None:
        """Compare later states with this one; call `rewind` before each call."""

    def end(self) -> None:
        """Keep nothing of the measurement alive."""

    def tell(self, lines: Sequence[str]) -> None:
        """Say each line once."""


class ChangedMeanwhile(StepError):
    """A cell changed what is measured while its turn had been given up."""


def in_progress() -> MeasurementGuard | None:
    """Return the measurement that has the user's objects at present, or has lent them back."""
    return _IN_PROGRESS[0] if _IN_PROGRESS else None


class MeasurementGuard:
    """Copies what a step changes at its beginning, and puts it back at its end.

    One at a time: raises StepError while there is another. `state` is the user's, `paused_s` are
    the seconds that were given away, `taking_s` those that copying took.
    """

    def __init__(self, step: MeasuredStep) -> None:
        if _IN_PROGRESS:
            raise StepError(BUSY)
        self.step = step
        self.paused_s = self.taking_s = 0.0
        self._at_home = False  # whether the user has everything back
        self._watch = ExitStack()

    def __enter__(self) -> MeasurementGuard:
        begun_s = time.perf_counter()
        self._iterators = Replays(self.step.walk())
        self._displays = Displays(shows_first=self.step.asked is None)
        try:
            _IN_PROGRESS.append(self)
            with interrupts.held_back():
                self._iterators.take()
                self.state = self.step.state()
                self._look_around()
            refuse_changed_elsewhere(self.state.overwritten, self.state.walk.name)
            self.step.begin(self.state, self._iterators.rewind)
            self.step.tell(unrestorable.before(self.state, self._iterators))
            self._watch.enter_context(audit.named(self.step.tell))
            self._displays.hold()
            self._warnings = RepeatedWarnings()
            self._warnings.hold()
            self.taking_s = time.perf_counter() - begun_s
        except BaseException:  # also a warning that the user has made an error
            self._watch.close()
            self.step.end()
            self._iterators.hand_back()
            if self in _IN_PROGRESS:
                _IN_PROGRESS.remove(self)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        _IN_PROGRESS.remove(self)
        self._watch.close()
        self.step.end()
        if not self._at_home:
            with interrupts.held_back():
                self._displays.release()
                self._warnings.release()
                self._go_home()
        self.step.tell(unrestorable.after(self.state, self._iterators))

    def _go_home(self, for_good: bool = True) -> None:
        try:
            self.state.restore()
            self._names.restore()
            self.state.failed.update(self._surroundings.restore())
        finally:
            self._iterators.hand_back(for_good)

    def _look_around(self) -> None:
        """Copy what is to come back beside the step's own state."""
        self._surroundings = Settings(process.surroundings())
        self._names = Namespace(self.step.names)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have the user's state in place for the block, with the plan that is in force.

        Raises ChangedMeanwhile if the block changed what is measured; the change stays.
        """
        start = time.perf_counter()
        plans = [plan for plan in map(applied_to, self.step.models) if plan is not None]
        with interrupts.held_back():
            self._displays.release(for_good=False)
            self._warnings.release()
            self._go_home(for_good=False)
            for plan in plans:
                show(plan)
            self._at_home = True
        fingerprint = Fingerprint(self.step.models, self.state)
        yield
        with interrupts.held_back():
            fact = fingerprint.difference()
            if self._iterators.used():
                fact = "a cell drew from an iterator that the step draws from"
            if fact:
                raise ChangedMeanwhile(f"ended: {fact} meanwhile. That stays, as the cell left it")
            self.state.adopt_random_state()
            self._at_home = False
            for plan in plans:
                hide(plan)
            self._iterators.take()
            self._look_around()  # also at what another cell has bound meanwhile
            self._displays.hold()
            self._warnings.hold()
        self.paused_s += time.perf_counter() - start
