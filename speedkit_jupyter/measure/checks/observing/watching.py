"""What a step does, told while it runs: model calls, backward passes, optimizer steps.

All patches of the accuracy check are here, confined to the thread that measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

from speedkit_jupyter.measure.rounds.confinement import optimizer_hooks, patched
from speedkit_jupyter.support.torch_private import is_transforming, without_dispatch_modes

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

    def after_step(self, optimizer: Any) -> None:
        """It has ended."""

    def before_zero_grad(self) -> None:
        """An optimizer or a module clears gradients."""


def unwatched(method: Callable[..., None]) -> Callable[..., None]:
    """What it computes is its own: no mode that rounds, promotes or replays sees it.

    Within `torch.func`'s transforms nothing is told: what is computed there has no values yet, or
    is one sample's. What comes out of them is compared.
    """

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> None:
        import torch

        if is_transforming():
            return
        with torch.DisableTorchFunction(), without_dispatch_modes(), torch.no_grad():
            method(*args, **kwargs)

    return call


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
        stack.enter_context(_watched_clearing(watcher))
        yield


@contextmanager
def _watched_calls(models: Sequence[torch.nn.Module], watcher: Watcher) -> Iterator[None]:
    from torch.nn import Module

    watched, depth = {id(model) for model in models}, 0

    def make(call: Any) -> Callable[..., Any]:
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

        return observed

    with patched(Module, "__call__", make):
        yield


@contextmanager
def _watched_autograd(watcher: Watcher) -> Iterator[None]:
    import torch

    depth = 0

    def make_backward(backward: Any) -> Callable[..., Any]:
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

        return observed

    def make_grad(grad: Any) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            gradients = grad(*args, **kwargs)
            watcher.differentiated(gradients)
            return gradients

        return observed

    with (
        patched(torch.autograd, "backward", make_backward),
        patched(torch.autograd, "grad", make_grad),
    ):
        yield


@contextmanager
def _watched_steps(watcher: Watcher) -> Iterator[None]:
    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        closure = any(callable(argument) for argument in (*args, *kwargs.values()))
        watcher.before_step(optimizer, closure)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        watcher.after_step(optimizer)

    with optimizer_hooks(before, after):
        yield


@contextmanager
def _watched_clearing(watcher: Watcher) -> Iterator[None]:
    from torch.nn import Module
    from torch.optim import Optimizer

    def make(clear: Any) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            watcher.before_zero_grad()
            return clear(*args, **kwargs)

        return observed

    with patched(Module, "zero_grad", make), patched(Optimizer, "zero_grad", make):
        yield
