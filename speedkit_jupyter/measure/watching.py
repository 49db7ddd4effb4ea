"""What a step does, told while it runs: model calls, backward passes, optimizer steps.

All patches of the accuracy check are here. They act in the thread that set them only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Watcher(Protocol):
    """Who is told."""

    def called(self, args: Any, kwargs: Any, result: Any) -> None:
        """One of the models was called from outside of it."""

    def before_backward(self, tensors: Any) -> None:
        """`torch.autograd.backward` begins, on these tensors."""

    def after_backward(self) -> None:
        """It has ended."""

    def differentiated(self, gradients: Any) -> None:
        """`torch.autograd.grad` gave these."""

    def before_step(self, optimizer: Any, with_closure: bool) -> None:
        """An optimizer begins its step."""

    def after_step(self) -> None:
        """It has ended."""


def confined(function: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """`function` in the thread that asks now, `otherwise` in every other."""
    mine = threading.get_ident()

    @wraps(otherwise)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        here = threading.get_ident() == mine
        return function(*args, **kwargs) if here else otherwise(*args, **kwargs)

    return chosen


@contextmanager
def watching(models: Sequence[torch.nn.Module], watcher: Watcher) -> Iterator[None]:
    """Tell the watcher of all that happens in the block, in this thread.

    Model calls are seen at `Module.__call__`, not by hooks: those would switch fused kernels off
    and compile the model anew.
    """
    with ExitStack() as stack:
        stack.enter_context(_watched_calls(models, watcher))
        stack.enter_context(_watched_autograd(watcher))
        stack.enter_context(_watched_steps(watcher))
        yield


@contextmanager
def _watched_calls(models: Sequence[torch.nn.Module], watcher: Watcher) -> Iterator[None]:
    from torch.nn import Module

    call = Module.__call__
    watched, depth = {id(one) for one in models}, 0

    def observed(module: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if id(module) not in watched:
            return call(module, *args, **kwargs)
        depth += 1
        try:
            result = call(module, *args, **kwargs)
        finally:
            depth -= 1
        if not depth:
            watcher.called(args, kwargs, result)
        return result

    Module.__call__ = confined(observed, call)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Module.__call__ = call  # type: ignore[method-assign]


@contextmanager
def _watched_autograd(watcher: Watcher) -> Iterator[None]:
    import torch

    backward, grad = torch.autograd.backward, torch.autograd.grad
    depth = 0

    def observed(tensors: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal depth
        if not depth:  # reentrant checkpoints run a backward pass inside the backward pass
            watcher.before_backward(tensors)
        depth += 1
        try:
            backward(tensors, *args, **kwargs)
        finally:
            depth -= 1
        if not depth:
            watcher.after_backward()

    def differentiated(*args: Any, **kwargs: Any) -> Any:
        found = grad(*args, **kwargs)
        watcher.differentiated(found)
        return found

    torch.autograd.backward = confined(observed, backward)
    torch.autograd.grad = confined(differentiated, grad)
    try:
        yield
    finally:
        torch.autograd.backward, torch.autograd.grad = backward, grad


@contextmanager
def _watched_steps(watcher: Watcher) -> Iterator[None]:
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        closure = any(callable(one) for one in (*args, *kwargs.values()))
        watcher.before_step(optimizer, closure)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        watcher.after_step()

    def nothing(optimizer: Any, args: Any, kwargs: Any) -> None:
        return None

    handles = [
        register_optimizer_step_pre_hook(confined(before, nothing)),
        register_optimizer_step_post_hook(confined(after, nothing)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
