"""A plain step under a plan: autocast and the GradScaler reach it at run time.

`loss_fn(model(x), y).backward()` is one statement, so the context of the forward pass
surrounds the whole step, and is suspended inside the backward pass and the optimizer's step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch.nn.utils import clip_grad

from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.step.discovery import holds
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.tracebacks import user_code_boundary
from speedkit_jupyter.torchglue.confinement import optimizer_hooks, patched
from speedkit_jupyter.torchglue.interrupts import is_python_thread
from speedkit_jupyter.torchglue.modules import CLIPPING_BEGINS, scaler_states


class Router:
    """Runs plain steps under the plan that `contexts` (one per model) share.

    What the step has `asked` its context for, `autocast` or `grad_scaler`, reaches it that way and
    is not routed. `installed()` surrounds a block of steps, `run(step)` each of them, so that a
    step costs as much as in the user's own loop. A plan that changes no precision costs nothing.
    """

    def __init__(
        self,
        contexts: Sequence[SpeedContext],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        asked: Collection[str] = (),
    ) -> None:
        lowered = [context for context in contexts if context.plan["precision"].active]
        scaled = [context for context in contexts if context.plan["grad_scaler"].active]
        self._context = lowered[0] if lowered and "autocast" not in asked else None
        self.lowers = self._context is not None  # whether autocast surrounds the step
        self._optimizers = list(optimizers)
        self._steps: ScaledSteps | None = None
        if scaled and "grad_scaler" not in asked:
            models = [context.model for context in contexts]
            self._steps = ScaledSteps(scaled[0].grad_scaler, optimizers, models)

    @user_code_boundary
    def run(self, step: Callable[[], Any]) -> Any:
        """Run one step; update the scaler once at its end, if any optimizer stepped in it."""
        with nullcontext() if self._context is None else self._context.autocast():
            result = step()
        if self._steps is not None:
            self._steps.update()
        return result

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Patch torch for a block of steps, and put it back after the block."""
        with ExitStack() as stack:
            if self._context is not None:
                device_type = self._context.device.type
                stack.enter_context(_suspended_in_steps(device_type, self._optimizers))
            if self._context is not None or self._steps is not None:
                stack.enter_context(self._routed_backward())
            if self._steps is not None:
                stack.enter_context(self._steps.installed())
            yield

    def _outside_autocast(self) -> AbstractContextManager[Any]:
        if self._context is None:  # the step surrounds its forward pass itself
            return nullcontext()
        return torch.autocast(self._context.device.type, enabled=False)

    @contextmanager
    def _routed_backward(self) -> Iterator[None]:
        """Run backward passes outside autocast, and of the scaled loss if the plan has a scaler."""
        inside = False

        def routed(backward: Any) -> Callable[..., Any]:
            def call(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
                nonlocal inside
                if inside:  # reentrant checkpoints run a backward pass inside the backward pass
                    return backward(tensors, grad_tensors, *args, **kwargs)
                inside = True
                # As where autocast ends before the backward pass: weights that were cast while
                # nothing was recorded, as in checkpoints, have no gradient (torch before 2.11).
                torch.clear_autocast_cache()
                try:
                    with self._outside_autocast():
                        if self._steps is not None:
                            tensors = self._steps.scaled(tensors, grad_tensors)
                        return backward(tensors, grad_tensors, *args, **kwargs)
                finally:
                    inside = False

            return call

        def plain(grad: Any) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with self._outside_autocast():
                    return grad(*args, **kwargs)

            return call

        backward = patched(torch.autograd, "backward", routed)
        with backward, patched(torch.autograd, "grad", plain):
            yield


@contextmanager
def _suspended_in_steps(
    device_type: str, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[None]:
    """Switch autocast off inside the steps of optimizers, but not in closures that they call."""
    # By thread: whether autocast was on around the steps under way, outermost first.
    kept = threading.local()

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        outside = torch.is_autocast_enabled(device_type)
        vars(kept).setdefault("enabled", []).append(outside)
        torch.set_autocast_enabled(device_type, False)

        def as_outside(value: Any) -> Any:
            """Have a closure's forward pass run as it does outside the step."""

            def closure(*args: Any, **kwargs: Any) -> Any:
                torch.set_autocast_enabled(device_type, outside)
                try:
                    return value(*args, **kwargs)
                finally:
                    torch.set_autocast_enabled(device_type, False)

            return wraps(value)(closure) if callable(value) else value

        return tuple(map(as_outside, args)), {k: as_outside(v) for k, v in kwargs.items()}

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if enabled := vars(kept).get("enabled"):  # else the step began before the hooks came
            torch.set_autocast_enabled(device_type, enabled.pop())

    with optimizer_hooks(before, after, optimizers):
        yield


class ScaledSteps:
    """Scales losses, and routes the steps of `optimizers` to `scaler.step(optimizer)`."""

    def __init__(
        self,
        scaler: torch.amp.GradScaler,
        optimizers: Sequence[torch.optim.Optimizer],
        models: Sequence[torch.nn.Module],
    ) -> None:
        self._scaler: Any = scaler
        self._known, self._models = list(optimizers), models
        self._stepped: set[int] = set()  # since the last update
        self._inside: set[int] = set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Route them for a block of steps."""
        with ExitStack() as stack:
            for optimizer in self._known:
                stack.enter_context(self._routed(optimizer))
            stack.enter_context(optimizer_hooks(self._refuse_unscaled))
            stack.enter_context(self._unscaled_before_clipping())
            yield

    def scaled(self, tensors: Any, grad_tensors: Any) -> Any:
        """Return the scaled loss of a backward pass.

        In an epoch, say, the scaler is updated once everything that steps has stepped.
        """
        if self._stepped and all(id(optimizer) in self._stepped for optimizer in self._known):
            self.update()
        if grad_tensors is not None:
            raise StepError("fp16: backward() with a gradient of its own can't be scaled")
        return self._scaler.scale(tensors)

    def update(self) -> None:
        """Update the scaler, if any optimizer stepped since it was last updated."""
        if self._stepped:
            self._stepped.clear()
            self._scaler.update()

    @contextmanager
    def _routed(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        attributes, here = vars(optimizer), threading.get_ident()
        before = {"step": attributes["step"]} if "step" in attributes else {}
        step, key = optimizer.step, id(optimizer)

        @wraps(step)  # learning rate schedulers look for their mark on it
        def routed(this: torch.optim.Optimizer, closure: Any = None) -> Any:
            # The losses of another thread of the user's were never scaled.
            if key in self._inside or (threading.get_ident() != here and is_python_thread()):
                return step() if closure is None else step(closure)
            if closure is not None:
                raise StepError("fp16: an optimizer with a closure can't be scaled")
            if key in self._stepped:  # the scaler takes one step of each between two updates
                scaler_states(self._scaler).pop(key, None)
            self._stepped.add(key)
            self._inside.add(key)
            try:
                return self._scaler.step(this)
            finally:
                self._inside.discard(key)

        # A method, as schedulers that are made meanwhile expect.
        optimizer.step = MethodType(routed, optimizer)  # type: ignore[method-assign]
        try:
            yield
        finally:
            attributes.pop("step", None)
            attributes.update(before)

    def _refuse_unscaled(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Raise StepError for one that the step makes: its gradients would stay scaled."""
        if id(optimizer) not in self._inside and holds(optimizer, self._models):
            raise StepError(
                f"fp16: the step makes {type(optimizer).__name__} itself: make it before the step, "
                "so that its gradients can be unscaled"
            )

    @contextmanager
    def _unscaled_before_clipping(self) -> Iterator[None]:
        """Unscale when gradients are clipped: both functions group them first."""
        from torch.amp.grad_scaler import OptState

        def unscaling(group: Any) -> Callable[..., Any]:
            def call(gradients: Any, *args: Any, **kwargs: Any) -> Any:
                states = scaler_states(self._scaler)
                for optimizer in self._known:
                    if states[id(optimizer)]["stage"] is OptState.READY:
                        self._scaler.unscale_(optimizer)
                return group(gradients, *args, **kwargs)

            return call

        with patched(clip_grad, CLIPPING_BEGINS, unscaling):
            yield
