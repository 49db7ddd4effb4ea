"""Guard the user's state during a measurement: copy it, and restore it in pauses and at the end.

A measurement pauses for other cells. It ends if a cell changes the measured state or a plan.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import process_time, sleep, thread_time
from typing import Any

import torch

from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.plans.context import hide, show
from speedkit_jupyter.state.effects import Output, effects_named
from speedkit_jupyter.state.replay import Replays
from speedkit_jupyter.state.snapshot import ProcessSettings, Snapshot, surroundings
from speedkit_jupyter.state.walk import Walk
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue import interrupts
from speedkit_jupyter.torchglue.private import version

ANOTHER_RUNS = (
    "another measurement is in progress, between the cells: stop it in its panel, or let it end, "
    "and run this again"
)
GIVEN_AGAIN = (
    "is/are drawn from: a replacement returns the same elements to next(), but the order of later "
    "epochs may differ"
)
# Other threads are busy if they use more than 50 µs of CPU time in 10 ms. Waiting threads use a few
# µs; a thread that adds a number every millisecond uses 200 µs.
AT_WORK_S = 5e-5
# Maximum number of names to list in a line; further names are counted.
MOST_NAMES = 5
# Holds at most one guard, because all measurements share the process, its flags and its clock.
_IN_PROGRESS: list[MeasurementGuard] = []


class ChangedMeanwhile(StepError):
    """Raised if a cell changed the measured state or a plan while the measurement paused."""

    def __init__(self, fact: str) -> None:
        super().__init__(f"ended: {fact} meanwhile. The change stays")


def in_progress() -> MeasurementGuard | None:
    """Return the guard of the measurement in progress, paused or not; else None."""
    return _IN_PROGRESS[0] if _IN_PROGRESS else None


class MeasurementGuard:
    """Copy the state that a step may change, filter its output, and restore the state on exit.

    A walk from `roots` finds the state. `tell` is called with lines about state and effects that
    can't be undone. With `off_device`, copies are in main memory. `paused_s` and `taking_s` are the
    seconds that pauses and the entry took. Raises StepError during another measurement, or if
    another thread trains one of `models`.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        models: Sequence[torch.nn.Module],
        tell: Callable[[Sequence[str]], None],
        off_device: bool = False,
    ) -> None:
        if _IN_PROGRESS:
            raise StepError(ANOTHER_RUNS)
        self._roots, self._models, self._tell = roots, models, tell
        self._off_device = off_device
        self._output = Output()
        self.paused_s = self.taking_s = 0.0
        self._at_home = False  # True while the user's state is in place
        self._watch = ExitStack()

    def __enter__(self) -> MeasurementGuard:
        begun_s = time.perf_counter()
        _refuse_trained_elsewhere(self._models)
        walk = Walk(self._roots)
        self._iterators = Replays(walk)
        self.rewind = self._iterators.rewind
        try:
            _IN_PROGRESS.append(self)
            with interrupts.interrupts_delayed():
                self._iterators.take()
                self.state = Snapshot(walk, self._off_device)
                self._surroundings = ProcessSettings(surroundings())
            self._tell(_unrestorable(self.state, self._iterators))
            self._watch.enter_context(effects_named(self._tell))
            self._output.hold()
            self.taking_s = time.perf_counter() - begun_s
        except BaseException:  # including warnings that the user's filters turn into errors
            self._watch.close()
            self._iterators.hand_back()
            _IN_PROGRESS.clear()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        _IN_PROGRESS.remove(self)
        self._watch.close()
        if not self._at_home:
            self._go_home()
        failed = self.state.failed.items()
        self._tell([f"{name} {why}" for name, why in failed if "put back" in why])
        self.state.let_go()  # else results would keep the snapshot's aliases of weights alive

    def _go_home(self, for_good: bool = True) -> None:
        """Release the output, and restore the user's state and iterators."""
        with interrupts.interrupts_delayed():
            self._output.release(for_good)
            try:
                self.state.restore()
                self.state.failed.update(self._surroundings.restore())
            finally:
                self._iterators.hand_back()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Restore the user's state and plans during the block.

        Raises ChangedMeanwhile if the block changed a plan or the measured state; the change stays.
        """
        start = time.perf_counter()
        plans = self._plans()
        with interrupts.interrupts_delayed():
            self._go_home(for_good=False)
            for plan in plans:
                show(plan)
            self._at_home = True
        shown = [(plan, plan.active) for plan in plans]
        yield
        with interrupts.interrupts_delayed():
            if [(plan, plan.active) for plan in self._plans()] != shown:
                raise ChangedMeanwhile("a plan was applied or restored")
            for plan in plans:
                hide(plan)
            self._iterators.take()
            named = (pair for model in self._models for pair in model.named_parameters())
            if changed := self.state.changed({id(parameter): name for name, parameter in named}):
                self._iterators.hand_back()
                for plan in plans:
                    show(plan)
                changed = "an object of the step" if changed.startswith("a ") else changed
                raise ChangedMeanwhile(f"{changed} changed")
            self.state.adopt_randomness()
            self._surroundings = ProcessSettings(surroundings())
            self._at_home = False
            self._output.hold()
        self.paused_s += time.perf_counter() - start

    def _plans(self) -> list[Any]:
        return [plan for plan in map(applied_to, self._models) if plan is not None]


def _refuse_trained_elsewhere(models: Sequence[torch.nn.Module]) -> None:
    """Raise StepError if another thread writes to a parameter of `models` within 0.1 s."""
    if threading.active_count() == 1:
        return
    begun_s = process_time() - thread_time()
    sleep(0.01)
    if process_time() - thread_time() - begun_s <= AT_WORK_S:
        return
    versions = [(n, p, version(p)) for m in models for n, p in m.named_parameters()]
    sleep(0.1)  # long enough for a step of most training loops
    if changed := next((name for name, p, before in versions if version(p) != before), ""):
        raise StepError(
            f"another thread changes {changed}, which the step reaches: measure when it has ended"
        )


def _unrestorable(state: Snapshot, iterators: Replays) -> list[str]:
    """Return lines that tell the user, by reason, which objects can't be restored."""
    walk = state.walk
    unknown = [
        f"{walk.name(instance)} ({type(instance).__name__})"
        for instance in walk.found.values()
        if any(handler.is_unrestorable(instance) for handler in walk.handlers(instance))
    ]
    named = {
        GIVEN_AGAIN: iterators.given_again,
        "is/are drawn from: only an iterator in a variable is replayed": iterators.drawn,
        "can't be copied, nor put back": [*unknown, *walk.elsewhere],
        "is/are too large to copy: changes by the step stay": state.too_large,
    }
    lines = [_line(names, text) for text, names in named.items() if names]
    lines += [f"{name} {why}, and can't be put back" for name, why in state.failed.items()]
    if walk.cut:
        reached = f"more than {len(walk.found):,} objects are reached"
        lines.append(f"{reached}: objects behind {walk.name(walk.cut[0])} can't be put back")
    return lines


def _line(names: Sequence[str], text: str) -> str:
    labels = list(dict.fromkeys(names))
    more = f" and {len(labels) - MOST_NAMES} more" if len(labels) > MOST_NAMES else ""
    text = text.replace("is/are", "are" if labels[1:] else "is")
    return f"{', '.join(labels[:MOST_NAMES])}{more} {text}"
