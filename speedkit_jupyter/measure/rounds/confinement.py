"""What a measurement patches or hooks acts in its own thread: others train on undisturbed.

torch keeps `torch.autograd.backward` and the hooks of all optimizers in one place for the whole
process. Autocast is each thread's own already; a switch of the process (TF32, SDPA) can't be
confined, and changes no more than rounding elsewhere.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.cuda_graphs import is_recording
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.interrupts import is_here, is_pythons

if TYPE_CHECKING:
    import torch

# What it returns, if anything, stands for the step's arguments.
StepHook = Callable[["torch.optim.Optimizer", Any, Any], Any]


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """`make(original)` in place of the function `owner.name`, for calls from this thread.

    What the owner has inherited it inherits again afterwards. What stands in says so by an
    attribute `stands_in_for`, and has the attributes that it was made with. Raises StepError where
    torch has moved it.
    """
    import torch

    get_ident = threading.get_ident
    here, original = get_ident(), _found(owner, name)
    if original is None:
        raise StepError(f"this torch has no {owner.__name__}.{name}, which this stands on")
    ours = make(original)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        # What is compiled now would break in two here; what is recorded is no part of the step.
        if torch.compiler.is_compiling() or get_ident() != here or is_recording():
            return original(*args, **kwargs)
        return ours(*args, **kwargs)

    vars(call).update(vars(ours) if isinstance(ours, FunctionType) else {})
    call.stands_in_for = original  # type: ignore[attr-defined]
    is_own = name in vars(owner)
    setattr(owner, name, call)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        elif name in vars(owner):  # the step may have taken it away
            delattr(owner, name)


def _found(owner: Any, name: str) -> Any:
    """What the owner has by that name, None without; a function as it is written there: to ask a
    class for it would count as one more version of the class, and Python (3.13) has a thousand.
    """
    found = inspect.getattr_static(owner, name, None)
    return found if inspect.isroutine(found) else getattr(owner, name, None)


@contextmanager
def optimizer_hooks(
    before: StepHook | None = None,
    after: StepHook | None = None,
    ours: Collection[torch.optim.Optimizer] = (),
) -> Iterator[None]:
    """Hooks around each step that an optimizer takes in this thread.

    Those of `ours` in the autograd engine's threads too, where on a GPU a gradient's own hook
    steps them; but a thread that Python code began has training of its own, of whatever optimizer.
    """
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    here, ids = threading.get_ident(), {id(optimizer) for optimizer in ours}

    def confined(hook: StepHook) -> StepHook:
        def call(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            if is_here(here) or (id(optimizer) in ids and not is_pythons()):
                return hook(optimizer, args, kwargs)
            return None

        return call

    handles = []
    try:
        if before is not None:
            handles.append(register_optimizer_step_pre_hook(confined(before)))
        if after is not None:
            handles.append(register_optimizer_step_post_hook(confined(after)))
        yield
    finally:
        for handle in handles:
            handle.remove()


# A step that computes in another thread, where the autocast of the measuring thread is not.

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
def calls_noted(models: Sequence[torch.nn.Module]) -> Iterator[Calls]:
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
def refused_elsewhere(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Raises StepError after the block where the models were called in other threads only."""
    with calls_noted(models) as calls:
        yield
    if calls.only_elsewhere:
        raise StepError(ELSEWHERE)
