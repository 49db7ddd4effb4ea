"""Steps that compute in another thread, where the autocast of the thread that measures is not."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.thread_origin import is_pythons

if TYPE_CHECKING:
    import torch

ELSEWHERE = (
    "the step computes in another thread, which autocast does not reach: use ctx.autocast() "
    "inside it"
)
NOT_REACHED = "the step computes in another thread, which the accuracy check does not reach"


class Calls:
    """Whether parts of the models were called in this thread, and in others."""

    def __init__(self) -> None:
        self.here = self.elsewhere = self.in_pythons = False

    @property
    def only_elsewhere(self) -> bool:
        """In other threads, of whatever kind, and never here."""
        return self.elsewhere and not self.here


@contextmanager
def noted(models: Sequence[torch.nn.Module]) -> Iterator[Calls]:
    """In which threads the block calls parts of the models.

    `in_pythons` are threads that Python code began: autograd's own, on a GPU, are none of these.
    """
    from torch.nn import Module

    watched, here = {id(part) for root in models for part in root.modules()}, threading.get_ident()
    calls = Calls()
    owner: Any = Module
    original = owner.__call__

    @wraps(original)
    def noting(module: Any, *args: Any, **kwargs: Any) -> Any:
        if id(module) in watched:
            if threading.get_ident() == here:
                calls.here = True
            else:
                calls.elsewhere = True
                calls.in_pythons = calls.in_pythons or is_pythons()
        return original(module, *args, **kwargs)

    owner.__call__ = noting
    try:
        yield calls
    finally:
        owner.__call__ = original


@contextmanager
def refused(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Raises StepError after the block where the models were called in other threads only."""
    with noted(models) as calls:
        yield
    if calls.only_elsewhere:
        raise StepError(ELSEWHERE)


@contextmanager
def errors_kept(others: Collection[threading.Thread], pass_on: bool) -> Iterator[list[str]]:
    """What threads raise in the block, a line each; nothing is printed unless it is `pass_on`.

    Where a plan failed, or float64 that did not reach the thread, it is not the user's code that
    did. What `others` raise is no concern of the step.
    """
    errors: list[str] = []
    original = threading.excepthook

    def keep(args: Any) -> None:
        its_own = args.thread is not None and args.thread not in others
        if its_own:
            first = (str(args.exc_value or "").strip().splitlines() or [""])[0]
            errors.append(f"in a thread of the step: {args.exc_type.__name__}: {first}")
        if pass_on or not its_own:
            original(args)

    threading.excepthook = keep
    try:
        yield errors
    finally:
        if threading.excepthook is keep:
            threading.excepthook = original
