"""Events of a step while it runs: model calls, backward passes, optimizer steps.

All patches of the accuracy check are here, confined to the thread that measures.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from speedkit_jupyter.torchglue.confinement import optimizer_hooks, patched
from speedkit_jupyter.torchglue.private import is_transforming, without_dispatch_modes


class Watcher:
    """Is told of all that a step does; subclasses do something about it.

    `called(args, kwargs, result)` tells of a model that was called from outside of it,
    `differentiated(gradients)` of `torch.autograd.grad`, `before_backward(tensors)` and
    `after_backward()` of `torch.autograd.backward`, `before_step(optimizer, with_closure)` and
    `after_step(optimizer)` of an optimizer, which may be a model's, too, in `before_zero_grad()`.
    """

    def ignored(self, *given: Any, **named: Any) -> None:
        """Do nothing."""

    called = differentiated = before_backward = after_backward = ignored
    before_step = after_step = before_zero_grad = ignored


def unwatched(method: Callable[..., None]) -> Callable[..., None]:
    """Have the method compute for itself: no mode that rounds, promotes or replays sees it.

    Nothing is told within `torch.func`'s transforms; what comes out of them is compared.
    """

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> None:
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
    calls = _around(
        after=lambda a, k, result: watcher.called(a[1:], k, result), only=set(map(id, models))
    )
    passes = _around(
        lambda a, k: watcher.before_backward(a[0] if a else k["tensors"]),
        lambda *_: watcher.after_backward(),
    )
    grads = _around(after=lambda a, k, result: watcher.differentiated(result))
    clears = _around(lambda a, k: watcher.before_zero_grad())

    def steps(optimizer: Any, args: Any, kwargs: Any) -> None:
        watcher.before_step(optimizer, any(map(callable, (*args, *kwargs.values()))))

    with (
        patched(torch.nn.Module, "__call__", calls),
        patched(torch.autograd, "backward", passes),
        patched(torch.autograd, "grad", grads),
        patched(torch.nn.Module, "zero_grad", clears),
        patched(torch.optim.Optimizer, "zero_grad", clears),
        optimizer_hooks(steps, lambda optimizer, *_: watcher.after_step(optimizer)),
    ):
        yield


def _around(
    before: Callable[[Any, Any], None] = lambda *_: None,
    after: Callable[[Any, Any, Any], None] = lambda *_: None,
    only: Collection[int] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes of a function one with calls around it; `only` with these first arguments.

    Nothing is told of a call within another one: a model in a model, a checkpoint's backward pass
    within the backward pass.
    """

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        depth = 0

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if only is not None and id(args[0]) not in only:
                return function(*args, **kwargs)
            if not depth:
                before(args, kwargs)
            depth += 1
            try:
                result = function(*args, **kwargs)
            finally:
                depth -= 1
            if not depth:
                after(args, kwargs, result)
            return result

        return call

    return make
