"""Facts of a step's first calls: its work, the optimizers that it makes, what it asks for.

A fit that is done, used-up data or a memo does less when it is called again. Its model calls and
backward passes tell, not its seconds: a first call is slow for many reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from speedkit_jupyter.catalog.facts.model import OptimizerFacts
from speedkit_jupyter.step.discovery import holds
from speedkit_jupyter.step.watching import Watcher, watching
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.torchglue.confinement import patched

# Two more steps are looked at if the first call took this many times as long as a later one: a
# step that does less is faster.
SUSPICIOUS = 1.5
# A call that does less than this share of the first one's work is not the user's step.
PART = 0.5


@dataclass
class StepWork(Watcher):
    """The work of a step: calls of the models (or their parts) from outside, backward passes."""

    calls: int = 0
    passes: int = 0

    def called(self, args: Any, kwargs: Any, result: Any) -> None:
        self.calls += 1

    def before_backward(self, tensors: Any) -> None:
        self.passes += 1

    def differentiated(self, gradients: Any) -> None:
        self.passes += 1


@dataclass(frozen=True)
class Repeats:
    """The work of later calls of the step; `line` tells the user if it is not the same."""

    afresh: bool = False  # each measured call has to begin in the user's own state
    alone: bool = False  # no other call can follow one
    line: str = ""


@dataclass(frozen=True)
class StepFacts:
    """The facts that the first calls of a step show.

    Attributes:
        asked: The parts of a plan that its code asks its context for, as "autocast"; the others are
            routed. None before the first call.
        made: The optimizers that the step makes itself.
        repeats: What later calls do; None where they were not compared with the first.
        leaves: Whether a call leaves something for the next one, or draws other numbers then.
    """

    asked: frozenset[str] | None = None
    made: tuple[OptimizerFacts, ...] = ()
    repeats: Repeats | None = None
    leaves: bool = True

    @property
    def afresh(self) -> bool:
        """Return whether each measured call has to begin in the user's own state."""
        return self.repeats is not None and self.repeats.afresh

    @property
    def alone(self) -> bool:
        """Return whether no other call can follow one."""
        return self.repeats is not None and self.repeats.alone

    @property
    def line(self) -> str:
        """Return the user's line about later calls that do less; empty where they don't."""
        return "" if self.repeats is None else self.repeats.line


# Before the first call.
UNKNOWN = StepFacts()


def is_suspicious(first_s: float, later_s: float) -> bool:
    """Return whether a later call may have done less, by how much faster it was."""
    return first_s > SUSPICIOUS * later_s


@contextmanager
def counted(models: Sequence[torch.nn.Module]) -> Iterator[StepWork]:
    """Count the work of one step in this thread."""
    work = StepWork()
    with watching([part for model in models for part in model.modules()], work):
        yield work


def ended(error: Exception) -> Repeats:
    """Return that a step can't be called again and again: it raised this after another call."""
    what = in_a_line(error)
    line = f"a call that follows others raises {what}; each measured one begins as your first does"
    return Repeats(afresh=True, alone=True, line=line)


def judged(first: StepWork, later: StepWork) -> Repeats:
    """Compare the work of two calls."""
    unit, most, least = "backward passes", first.passes, later.passes
    if not most:
        unit, most, least = "model calls", first.calls, later.calls
    if least >= most:
        return Repeats()
    does = f"a call that follows another does less ({least} instead of {most} {unit})"
    if least < PART * most:
        return Repeats(afresh=True, line=f"{does}: each measured one begins as your first does")
    return Repeats(line=f"{does}: later calls are timed")


@contextmanager
def optimizers_made(models: Sequence[torch.nn.Module]) -> Iterator[list[OptimizerFacts]]:
    """Collect the facts of each kind of optimizer that this thread makes for one of the models."""
    kinds: list[OptimizerFacts] = []

    def make(begin: Any) -> Callable[..., None]:
        def noted(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            begin(optimizer, *args, **kwargs)
            if holds(optimizer, models):
                facts = OptimizerFacts.read(optimizer, models)
                if facts not in kinds:
                    kinds.append(facts)

        return noted

    with patched(torch.optim.Optimizer, "__init__", make):
        yield kinds
