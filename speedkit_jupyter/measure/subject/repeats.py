"""Whether a step does its work again: a fit that is done, used-up data or a memo does less.

Rounds begin in a warm state, in which such a step has nothing left to do. What tells is what it
does (model calls, backward passes), not how long it takes: a first call is slow for many reasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.checks.observing.watching import watching

if TYPE_CHECKING:
    import torch


# Two more steps are looked at only where the first call took so many times as long as a later one:
# a step that does less is faster.
SUSPICIOUS = 1.5
# A call that does less than this share of the first one's work is not the user's step.
PART = 0.5


@dataclass
class Work:
    """What a step did: calls of the models (or their parts) from outside, backward passes."""

    calls: int = 0
    passes: int = 0

    def called(self, args: Any, kwargs: Any, result: Any) -> None:
        self.calls += 1

    def before_backward(self, tensors: Any) -> None:
        self.passes += 1

    def after_backward(self) -> None:
        pass

    def differentiated(self, gradients: Any) -> None:
        self.passes += 1

    def before_step(self, optimizer: Any, with_closure: bool) -> None:
        pass

    def after_step(self, optimizer: Any) -> None:
        pass

    def before_zero_grad(self) -> None:
        pass


@dataclass(frozen=True)
class Repeats:
    """What a call from the user's own state does, and one after it (`later`).

    `afresh` says that each measured call has to begin in the user's own state, `alone` that no
    other one can follow it; `line` what is to be known about it, empty where both do the same.
    """

    first: Work
    later: Work
    afresh: bool = False
    alone: bool = False
    line: str = ""


def is_suspicious(first_s: float, later_s: float) -> bool:
    """Whether a later call was so much faster that it may have done less."""
    return first_s > SUSPICIOUS * later_s


@contextmanager
def counted(models: Sequence[torch.nn.Module]) -> Iterator[Work]:
    """The work of one step in this thread."""
    work = Work()
    with watching([part for model in models for part in model.modules()], work):
        yield work


def ended(error: Exception) -> Repeats:
    """Of a step that can't be called again and again (a schedule has so many steps), as it raised
    after a call that it did make.
    """
    first = (str(error).strip().splitlines() or [""])[0]
    what = f"{type(error).__name__}: {first:.120}"
    line = f"a call that follows others raises {what}; each measured one begins as your first does"
    return Repeats(Work(), Work(), afresh=True, alone=True, line=line)


def judged(first: Work, later: Work, unrestorable: bool) -> Repeats:
    """`unrestorable` says that the step reaches what can't be put back."""
    unit, most, least = "backward pass", first.passes, later.passes
    if not most:
        unit, most, least = "model call", first.calls, later.calls
    if not first.passes and not first.calls and unrestorable:
        return Repeats(first, later, line=USED_UP)
    if least >= most:
        return Repeats(first, later)
    does = f"a call that follows another does less ({least} instead of {_count(most, unit)})"
    if least < PART * most:
        return Repeats(
            first, later, afresh=True, line=f"{does}: each measured one begins as your first does"
        )
    return Repeats(first, later, line=f"{does}: measured are such later calls")


USED_UP = (
    "after its first call the step neither calls the model nor runs a backward pass: what it uses "
    "up or keeps can't be put back, so that measured is a step without them"
)


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'es' if unit.endswith('s') else 's'}" if number != 1 else f"1 {unit}"
