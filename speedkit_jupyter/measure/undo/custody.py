"""A measurement works on the user's own objects: taken, handed back for a while, put back.

Between the turns of an event loop any cell may run. So before a turn is given up the user's state
is back in place, plans, iterators and all; and if a cell changed it meanwhile, it is the cell's:
nothing of it is touched again, and the measurement ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.undo import beyond
from speedkit_jupyter.measure.undo.displays import Displays
from speedkit_jupyter.measure.undo.fingerprint import Fingerprint
from speedkit_jupyter.measure.undo.graphs import Graphs
from speedkit_jupyter.measure.undo.iterators import Replays
from speedkit_jupyter.measure.undo.kinds.code.bindings import Bindings
from speedkit_jupyter.measure.undo.kinds.files.descriptors import Descriptors
from speedkit_jupyter.measure.undo.kinds.process import process
from speedkit_jupyter.measure.undo.kinds.process.abstract_classes import Registrations
from speedkit_jupyter.measure.undo.kinds.process.patches import Patches
from speedkit_jupyter.measure.undo.kinds.process.torch_registries import COMPILER_SETTINGS
from speedkit_jupyter.measure.undo.kinds.settings import Settings
from speedkit_jupyter.measure.undo.repeated_warnings import RepeatedWarnings
from speedkit_jupyter.plans.applying import applied_to, hide, show
from speedkit_jupyter.support import interrupts
from speedkit_jupyter.support.exceptions import StepError

if TYPE_CHECKING:
    from speedkit_jupyter.measure.subject.step import Step

BUSY = (
    "another measurement is in progress, between the cells: stop it in its panel, or let it end, "
    "and run this again"
)
# State at module level, on purpose: all measurements share one process, its flags and its clock.
_IN_PROGRESS: list[Visit] = []


class ChangedMeanwhile(StepError):
    """A cell changed what is measured while its turn had been given up."""


def in_progress() -> Visit | None:
    """The measurement that has the user's objects at present, or has lent them back."""
    return _IN_PROGRESS[0] if _IN_PROGRESS else None


class Visit:
    """What a step changes, copied when the visit begins and put back at its end.

    One at a time: raises StepError while there is another. `state` is the user's, `paused_s` are
    the seconds that were given away, `taking_s` those that copying took.
    """

    def __init__(self, step: Step) -> None:
        if _IN_PROGRESS:
            raise StepError(BUSY)
        self.step = step
        self.paused_s = self.taking_s = 0.0
        self._at_home = False  # whether the user has everything back

    def __enter__(self) -> Visit:
        begun_s = time.perf_counter()
        self._iterators = Replays(self.step.walk())
        try:
            _IN_PROGRESS.append(self)
            with interrupts.held_back():
                self._iterators.take()
                self.state = self.step.state()
                self._look_around()
            self.step.begin(self.state, self._iterators.rewind)
            walk = self.state.walk
            words = self._patches.words
            self._graphs = Graphs(walk)
            leaves = words.leaves(walk.found.values(), walk.near)
            self.step.tell(beyond.before(self.state, self._iterators, leaves))
            self.step.tell(beyond.of_graphs(self._graphs, words.codes))
            self.step.tell(beyond.of_words(walk, words))
            self._displays = Displays(shows_first=self.step.asked is None)
            self._displays.hold()
            self._warnings = RepeatedWarnings()
            self._warnings.hold()
            self.taking_s = time.perf_counter() - begun_s - self.state.meanwhile.waited_s
        except BaseException:  # also a warning that the user has made an error
            self.step.end()
            self._iterators.hand_back()
            if self in _IN_PROGRESS:
                _IN_PROGRESS.remove(self)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        _IN_PROGRESS.remove(self)
        self.step.end()
        if not self._at_home:
            with interrupts.held_back():
                self._displays.release()
                self._warnings.release()
                self._go_home()
        self.step.tell(beyond.after(self.state, self._iterators, self._graphs))
        self._graphs.forget()

    def _go_home(self, for_good: bool = True) -> None:
        try:
            self.state.restore()
            self._bindings.restore()
            self.state.failed.update(self._surroundings.restore(self._spelled))
            self.state.failed.update(self._patches.restore())
            self.state.failed.update(self._descriptors.restore())
            self.state.failed.update(self._registrations.restore())
        finally:
            self._iterators.hand_back(for_good)

    def _look_around(self) -> None:
        """What is to come back beside the step's own state."""
        self._surroundings = Settings(process.surroundings())
        objects = self.state.walk.found.values()
        self._patches = Patches(objects)
        words = self._patches.words
        self._bindings = Bindings(objects, words, self.step.names)
        self._descriptors = Descriptors(objects, words)
        self._registrations = Registrations(objects, self._patches.spaces, words)

    def _spelled(self) -> set[str]:
        """The words of the user's code, and of what variants do beside it."""
        named = self._patches.words.named
        return named | {COMPILER_SETTINGS} if self.step.compiles else named

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The user's state in place for the block, with the plan that is in force.

        Raises ChangedMeanwhile where the block changed what is measured; that then stays.
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
        fingerprint = Fingerprint(self.step, self.state)
        yield
        with interrupts.held_back():
            fact = fingerprint.difference() or self._other_values()
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

    def _other_values(self) -> str:
        if self._iterators.used():
            return "a cell drew from an iterator that the step draws from"
        return "" if self.state.holds() else "a cell changed the model or its optimizer"
