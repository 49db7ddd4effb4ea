"""What a step does, told while it runs: model calls, backward passes, optimizer steps.

All patches of the accuracy check are here, confined to the thread that measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.rounds.confinement import optimizer_hooks, patched
from speedkit_jupyter.support.torch_private import is_transforming, without_dispatch_modes

if TYPE_CHECKING:
    import torch


class Watcher:
    """Is told of all that a step does; subclasses do something about it."""

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
    import torch
    from torch.nn import Module
    from torch.optim import Optimizer

    ids = {id(model) for model in models}
    depths = {"call": 0, "backward": 0}  # a model in a model, a checkpoint in a backward pass

    def calling(call: Any) -> Callable[..., Any]:
        def observed(module: Any, *args: Any, **kwargs: Any) -> Any:
            if id(module) not in ids:
                return call(module, *args, **kwargs)
            with _deeper(depths, "call"):
                result = call(module, *args, **kwargs)
            if not depths["call"]:
                watcher.called(args, kwargs, result)
            return result

        return observed

    def going_back(backward: Any) -> Callable[..., Any]:
        def observed(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if not depths["backward"]:
                watcher.before_backward(tensors)
            with _deeper(depths, "backward"):
                backward(tensors, *args, **kwargs)
            if not depths["backward"]:
                watcher.after_backward()

        return observed

    def differentiating(grad: Any) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            gradients = grad(*args, **kwargs)
            watcher.differentiated(gradients)
            return gradients

        return observed

    def clearing(clear: Any) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            watcher.before_zero_grad()
            return clear(*args, **kwargs)

        return observed

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        watcher.before_step(optimizer, any(map(callable, (*args, *kwargs.values()))))

    with (
        patched(Module, "__call__", calling),
        patched(torch.autograd, "backward", going_back),
        patched(torch.autograd, "grad", differentiating),
        patched(Module, "zero_grad", clearing),
        patched(Optimizer, "zero_grad", clearing),
        optimizer_hooks(before, lambda optimizer, *_: watcher.after_step(optimizer)),
    ):
        yield


@contextmanager
def _deeper(depths: dict[str, int], name: str) -> Iterator[None]:
    depths[name] += 1
    try:
        yield
    finally:
        depths[name] -= 1
