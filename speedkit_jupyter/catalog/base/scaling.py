"""Scale losses inside the user's own loop, without a change of its code.

A backward pass that reaches a planned model starts from the scaled loss. Gradients are unscaled
before they are clipped and before an optimizer steps, which skips gradients that overflowed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.nn.utils import clip_grad

from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.torchglue.confinement import optimizer_hooks, patched
from speedkit_jupyter.torchglue.modules import CLIPPING_BEGINS, scaler_states
from speedkit_jupyter.torchglue.private import tree_leaves

# A checkpoint that runs its backward pass inside of the backward pass hides its parameters.
HIDES_PARAMETERS = "CheckpointFunctionBackward"


class Loop:
    """The scaled steps of one thread, for all models with a plan that scales there.

    The first plan provides the scaler. Once the user's own code scales a loss, with this scaler or
    another, it must also unscale, step and update.
    """

    def __init__(self) -> None:
        self.targets: list[Target] = []
        self._stack = ExitStack()
        self._begin()

    def _begin(self) -> None:
        self._is_inside = self._is_users = False
        self._scaler: Any = None  # of the gradients so far
        self._stepped: set[int] = set()  # optimizers, since the scaler was last updated
        self._every: set[int] = set()  # optimizers that have ever stepped
        self._receives: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._losses: list[Any] = []  # the graphs of the last scaled backward pass

    def begin(self, target: Target) -> None:
        """Scale the losses of a model from now on; plans end in any order."""
        if not self.targets:
            stack = self._stack
            stack.enter_context(patched(torch.autograd, "backward", self._scaling_backward))
            stack.enter_context(patched(torch.amp.GradScaler, "scale", self._noting_scale))
            stack.enter_context(patched(clip_grad, CLIPPING_BEGINS, self._unscaling_first))
            stack.enter_context(optimizer_hooks(self._before_step, self._after_step))
        self.targets.append(target)

    def end(self, target: Target) -> None:
        """Scale no more losses of the model."""
        self.targets.remove(target)
        if not self.targets or self._scaler is target.memo.scaler:
            self.settle()
            self._begin()
        if not self.targets:
            self._stack.close()

    def settle(self) -> None:
        """Update the scaler, if an optimizer stepped since it was last updated."""
        if self._stepped:
            self._stepped.clear()
            self._scaler.update()

    # The patches and hooks.

    def _noting_scale(self, scale: Any) -> Callable[..., Any]:
        def call(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            self._is_users = self._is_users or not self._is_inside
            return scale(scaler, outputs)

        return call

    def _scaling_backward(self, backward: Any) -> Callable[..., Any]:
        def call(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            reached = None if self._is_inside or self._is_users else self._reached(tensors)
            if reached is None:
                return backward(tensors, grad_tensors, *args, **kwargs)
            try:
                try:
                    self._is_inside = True  # a backward pass inside of this one has scaled losses
                    return backward(*self._scaled(reached, tensors, grad_tensors), *args, **kwargs)
                finally:
                    self._is_inside = False
            finally:  # again: Ctrl-C may interrupt the first line of the inner `finally`
                self._is_inside = False

        return call

    def _scaled(self, reached: Target, tensors: Any, grad_tensors: Any) -> tuple[Any, Any]:
        """Return the losses and their gradients, one of the two scaled."""
        if self._every and self._every <= self._stepped:
            self.settle()
        self._scaler = self._scaler or reached.memo.scaler
        scaled = self._scaler.scale(tensors)
        if grad_tensors is None:
            return scaled, None
        return tensors, self._scaler.scale(grad_tensors)

    def _unscaling_first(self, group: Any) -> Callable[..., Any]:
        """Unscale when gradients are clipped: both functions of torch group them first."""

        def call(gradients: Any, *args: Any, **kwargs: Any) -> Any:
            clipped = {id(one) for each in gradients for one in each}
            if self._scaler is not None and not self._is_inside:
                live = [one for target in self.targets for one in target.live_optimizers()]
                for optimizer in {id(one): one for one in live}.values():
                    if any(id(one.grad) in clipped for one in _parameters(optimizer)):
                        self._unscale(optimizer)
            return group(gradients, *args, **kwargs)

        return call

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        acts = not (self._is_inside or self._is_users or self._scaler is None)
        if not acts or not self._received(optimizer):
            return
        self._unscale(optimizer)
        record = scaler_states(self._scaler)[id(optimizer)]
        if sum(float(found) for found in record["found_inf_per_device"].values()):
            for parameter in _parameters(optimizer):
                parameter.grad = None  # the step passes over it

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._scaler is not None and id(optimizer) in scaler_states(self._scaler):
            scaler_states(self._scaler)[id(optimizer)]["stage"] = OptState.STEPPED
            self._stepped.add(id(optimizer))
            self._every.add(id(optimizer))

    def _unscale(self, optimizer: torch.optim.Optimizer) -> None:
        states, key = scaler_states(self._scaler), id(optimizer)
        if states[key]["stage"] is OptState.STEPPED:  # it steps again before the scaler is updated
            states.pop(key)
        if states[key]["stage"] is OptState.READY:
            self._scaler.unscale_(optimizer)

    # Whose gradients are scaled.

    def _reached(self, losses: Any) -> Target | None:
        """Return the plan to whose model a gradient of the losses goes."""
        alive = [target for target in self.targets if target.model is not None]
        owners = {id(one): target for target in alive for one in target.model.parameters()}
        nodes = [one.grad_fn for one in tree_leaves(losses) if one.grad_fn is not None]
        found = (
            alive[0] if one is None else owners.get(id(one)) for one in _leaves(nodes) if alive
        )
        reached = next((target for target in found if target is not None), None)
        self._losses = self._losses if reached is None else nodes
        return reached

    def _received(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer's gradients came from a scaled backward pass."""
        if not self._receives.get(optimizer):
            held = {id(one) for one in _parameters(optimizer)}
            ends = _leaves(self._losses)
            self._receives[optimizer] = any(one is None or id(one) in held for one in ends)
        return self._receives[optimizer]


class Loops(threading.local):
    """The scaled steps of each thread."""

    def __init__(self) -> None:
        self.here = Loop()


LOOPS = Loops()


def settle() -> None:
    """Update this thread's scaler after a whole step: it tells whether a step was skipped."""
    LOOPS.here.settle()


@contextmanager
def scaled(target: Target) -> Iterator[None]:
    """Scale the losses of the plan's model in the block, in this thread."""
    loop = LOOPS.here
    loop.begin(target)
    try:
        yield
    finally:
        loop.end(target)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (one for group in optimizer.param_groups for one in group["params"])


def _leaves(nodes: Iterable[Any]) -> Iterator[torch.Tensor | None]:
    """Yield the tensors that gradients go to, deepest first; None for what can't be seen."""
    nodes = [*nodes]
    seen = {*nodes}
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == HIDES_PARAMETERS:
            yield None
        elif (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
