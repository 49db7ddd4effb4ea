"""Confine patches and hooks to the step's threads; detect models called in other threads."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch.nn import Module
from torch.optim import optimizer as torchs

from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue.interrupts import is_python_thread

# A hook before or after an optimizer's step; a pre-hook may return new (args, kwargs).
StepHook = Callable[["torch.optim.Optimizer", Any, Any], Any]
ELSEWHERE = (
    "the step computes in another thread, which autocast does not reach: use ctx.autocast() "
    "inside it"
)
NOT_REACHED = "the step computes in another thread, which the accuracy check does not reach"
# Threads that call a model: the measuring thread, other Python threads, and autograd's threads.
HERE, IN_PYTHONS, IN_AUTOGRADS = "here", "in Python's", "in autograd's"

# This is global, because patched functions and code that records a CUDA graph share no object.
_THREAD = threading.local()


def is_recording() -> bool:
    """Return whether this thread is recording a CUDA graph."""
    return getattr(_THREAD, "is_recording", False)


@contextmanager
def recording() -> Iterator[None]:
    """Mark this thread as recording a CUDA graph, so that patched functions call the originals."""
    _THREAD.is_recording = True
    try:
        yield
    finally:
        _THREAD.is_recording = False


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Replace `owner.name` with `make(original)` within the block, for calls in this thread.

    Compiled code and CUDA graph recordings call the original. The replacement has the attributes of
    the new function, and `stands_in_for`: the original. Raises StepError if `owner` lacks `name`.
    """
    get_ident = threading.get_ident
    here = get_ident()
    original: Any = inspect.getattr_static(owner, name, None)
    original = original if inspect.isroutine(original) else getattr(owner, name, None)
    if original is None:
        raise StepError(f"this torch has no {owner.__name__}.{name}, which SpeedKit needs here")
    ours = make(original)  # set to `original` if a later patch outlives this one

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        # The replacement would cause a graph break; CUDA graph recording is not part of the step.
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
        now = inspect.getattr_static(owner, name, None)
        if is_own and now is call:
            setattr(owner, name, original)
        elif is_own:  # a later patch wraps this one and ends after it
            ours = original
        elif name in vars(owner):  # inherited; the step may have removed the replacement
            delattr(owner, name)


@contextmanager
def optimizer_hooks(
    before: StepHook | None = None,
    after: StepHook | None = None,
    ours: Collection[torch.optim.Optimizer] = (),
) -> Iterator[None]:
    """Call `before` and `after` around this thread's optimizer steps in the block.

    Optimizers in `ours` are also observed in autograd's threads, where gradient hooks may run.
    """
    here, ids = threading.get_ident(), {id(optimizer) for optimizer in ours}

    def confined(hook: StepHook) -> StepHook:
        def call(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            __tracebackhide__ = True
            if threading.get_ident() == here or (id(optimizer) in ids and not is_python_thread()):
                return hook(optimizer, args, kwargs)
            return None

        return call

    with ExitStack() as stack:
        if before is not None:
            stack.enter_context(torchs.register_optimizer_step_pre_hook(confined(before)))
        if after is not None:
            stack.enter_context(torchs.register_optimizer_step_post_hook(confined(after)))
        yield


@contextmanager
def calling_threads(models: Sequence[torch.nn.Module]) -> Iterator[set[str]]:
    """Yield a set that collects where models are called: HERE, IN_PYTHONS or IN_AUTOGRADS."""
    watched, here = {id(part) for root in models for part in root.modules()}, threading.get_ident()
    threads = set[str]()
    original: Any = Module.__call__

    @wraps(original)
    def noting(module: Any, *args: Any, **kwargs: Any) -> Any:
        if id(module) in watched:
            if threading.get_ident() == here:
                threads.add(HERE)
            else:
                threads.add(IN_PYTHONS if is_python_thread() else IN_AUTOGRADS)
        return original(module, *args, **kwargs)

    Module.__call__ = noting  # type: ignore[method-assign]
    try:
        yield threads
    finally:
        Module.__call__ = original  # type: ignore[method-assign]


@contextmanager
def refused_elsewhere(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Raise StepError after the block if the models were called only in other threads."""
    with calling_threads(models) as threads:
        yield
    if threads and HERE not in threads:
        raise StepError(ELSEWHERE)
