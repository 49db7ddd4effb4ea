"""Loss scaling inside of the user's own loop, whose lines stay as they are.

Under fp16 each backward pass is made of the scaled loss, and its gradients are unscaled as soon as
it ends: code after `backward()` sees gradients as without a plan. Gradients that overflowed are
passed over by the next step of an optimizer that holds them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.torchglue.confinement import optimizer_hooks, patched
from speedkit_jupyter.torchglue.modules import scaler_states
from speedkit_jupyter.torchglue.private import tree_leaves


class Loop:
    """The scaled backward passes of one thread, while a model has a plan that scales.

    The first plan provides the scaler, for all losses: its factor is a power of two, so other
    models get the same gradients, bit for bit. Once the user's own code scales a loss, with this
    scaler or another, all is left to that code.
    """

    def __init__(self) -> None:
        self.targets: list[Target] = []
        self._stack = ExitStack()
        self._begin()

    def _begin(self) -> None:
        self._is_inside = self._is_users = False
        self._overflows: list[tuple[set[int], list[torch.Tensor]]] = []  # parameters, and findings
        self._held: dict[int, list[tuple[torch.Tensor, Any]]] = {}  # gradients that a step skips
        self._unscaled: set[int] = set()  # within the backward pass under way
        self._holders: list[Any] = []  # which the scaler knows by their ids until it is updated

    def begin(self, target: Target) -> None:
        """Scale losses from now on; plans end in any order."""
        if not self.targets:
            stack = self._stack
            stack.enter_context(patched(torch.autograd, "backward", self._scaling_backward))
            stack.enter_context(patched(torch.amp.GradScaler, "scale", self._noting_scale))
            stack.enter_context(optimizer_hooks(self._before_step, self._after_step))
        self.targets.append(target)

    def end(self, target: Target) -> None:
        """Scale no more losses for this plan."""
        self.targets.remove(target)
        if not self.targets:
            self._stack.close()
            self._begin()

    # The patches and hooks.

    def _noting_scale(self, scale: Any) -> Callable[..., Any]:
        def call(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            is_own = not self._is_inside and scaler.is_enabled()
            self._is_users = self._is_users or is_own
            return scale(scaler, outputs)

        return call

    def _scaling_backward(self, backward: Any) -> Callable[..., Any]:
        def call(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: Any = None,
            create_graph: bool = False,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            rest = (retain_graph, create_graph, *args)
            # A gradient that is differentiated again must not be changed in between.
            if self._is_inside or self._is_users or create_graph:
                return backward(tensors, grad_tensors, *rest, **kwargs)
            try:
                try:
                    self._is_inside = True
                    return self._scaled(backward, tensors, grad_tensors, rest, kwargs)
                finally:
                    self._is_inside = False
            finally:  # Ctrl-C may have come at the first line of the other `finally`
                self._is_inside = False

        return call

    def _scaled(
        self, backward: Any, tensors: Any, grad_tensors: Any, rest: Any, kwargs: Any
    ) -> Any:
        scaler = self.targets[0].memo.scaler
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else grad_tensors
        given = list(given) if given else [None] * len(losses)
        scaled = [
            scaler.scale(torch.ones_like(loss) if one is None and loss.numel() == 1 else one)
            if one is not None or loss.numel() == 1
            else None  # torch says that this needs a gradient
            for loss, one in zip(losses, given, strict=True)
        ]
        leaves = self._leaves(losses)
        before = [one.grad for one in leaves if one.grad is not None]
        self._unscaled.clear()
        with torch.no_grad():
            for gradient in before:  # which this backward pass adds to
                gradient.mul_(scaler.get_scale())
        try:
            return backward(losses, scaled, *rest, **kwargs)
        finally:
            self._unscale(scaler, [one for one in leaves if id(one) not in self._unscaled])
            if scaler_states(scaler):
                scaler.update()
            self._holders.clear()

    def _unscale(self, scaler: Any, leaves: Sequence[torch.Tensor]) -> None:
        """Unscale gradients in place, and note where some are not finite."""
        holders = SimpleNamespace(param_groups=[{"params": leaves}])
        if not any(one.grad is not None for one in leaves):
            return
        self._holders.append(holders)
        scaler.unscale_(holders)
        found = scaler_states(scaler)[id(holders)]["found_inf_per_device"]
        copies = [one.clone() for one in found.values()]
        self._overflows.append(({id(one) for one in leaves}, copies))
        del self._overflows[:-KEPT]

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Take gradients that overflowed away for one step, which passes over them."""
        if self._is_users or not self.targets:
            return
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if self._is_inside:  # it steps in a hook of a gradient, within the backward pass
            scaler = self.targets[0].memo.scaler
            self._unscale(scaler, [one for one in parameters if id(one) not in self._unscaled])
            self._unscaled |= set(map(id, parameters))
        ids = set(map(id, parameters))
        mine = [found for leaves, found in self._overflows if leaves & ids]
        self._overflows = [pair for pair in self._overflows if not pair[0] & ids]
        if any(float(one) for found in mine for one in found):
            self._held[id(optimizer)] = [(one, one.grad) for one in parameters]
            for one in parameters:
                one.grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._held.pop(id(optimizer), ()):
            parameter.grad = gradient

    def _leaves(self, losses: Iterable[Any]) -> list[torch.Tensor]:
        """Return the tensors that gradients of the losses go to."""
        nodes = [one.grad_fn for one in tree_leaves(losses) if one.grad_fn is not None]
        seen, found = {*nodes}, dict[int, torch.Tensor]()
        while nodes:
            node = nodes.pop()
            if (leaf := getattr(node, "variable", None)) is not None:
                found[id(leaf)] = leaf
            following = {one for one, _ in node.next_functions if one is not None} - seen
            seen |= following
            nodes += following
        for target in self.targets:  # a reentrant checkpoint hides its parameters
            model = target.model
            found |= {id(one): one for one in (() if model is None else model.parameters())}
        return [*found.values()]


# Backward passes whose overflows are remembered until an optimizer steps.
KEPT = 64


class Loops(threading.local):
    """The scaled steps of each thread."""

    def __init__(self) -> None:
        self.here = Loop()


LOOPS = Loops()


@contextmanager
def scaled(target: Target) -> Iterator[None]:
    """Scale the losses of this thread in the block."""
    loop = LOOPS.here
    loop.begin(target)
    try:
        yield
    finally:
        loop.end(target)
