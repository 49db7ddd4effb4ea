"""A plain step under a plan: autocast and the GradScaler reach it at run time.

`loss_fn(model(x), y).backward()` is one statement, so what must surround the forward pass
surrounds the whole step, and is suspended inside the backward pass and the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.context import SpeedContext
from speedkit_jupyter.exceptions import StepError

if TYPE_CHECKING:
    import torch

MISSING = object()


class Router:
    """Runs plain steps under the plan that `contexts` (one per model) share.

    `installed()` surrounds a block of steps, `run(step)` each of them, so that a step costs
    what it costs in the user's own loop. A plan that changes no precision costs nothing.
    """

    def __init__(
        self, contexts: Sequence[SpeedContext], optimizers: Sequence[torch.optim.Optimizer] = ()
    ) -> None:
        lowered = [one for one in contexts if one.plan["precision"].active]
        scaled = [one for one in contexts if one.plan["grad_scaler"].active]
        self._context = lowered[0] if lowered else None
        self._scaler = scaled[0].grad_scaler if scaled else None
        self._optimizers = list(optimizers)
        self._scaled_a_step = False

    def run(self, step: Callable[[], Any]) -> Any:
        """One step; the scaler is updated once at its end, if any optimizer stepped in it."""
        __tracebackhide__ = True
        with nullcontext() if self._context is None else self._context.autocast():
            result = step()
        if self._scaled_a_step and self._scaler is not None:
            self._scaled_a_step = False
            self._scaler.update()
        return result

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Everything that must be patched for a block of steps, and is put back after it."""
        with ExitStack() as stack:
            if self._context is not None:
                device_type = self._context.device.type
                stack.enter_context(_suspended_in_steps(device_type))
                stack.enter_context(self._routed_backward(device_type))
            if self._scaler is not None:
                for optimizer in self._optimizers:
                    stack.enter_context(self._routed_step(optimizer))
                stack.enter_context(self._unscaled_before_clipping())
            yield

    @contextmanager
    def _routed_backward(self, device_type: str) -> Iterator[None]:
        """Outside autocast; and of the scaled loss, where the plan has a scaler."""
        import torch

        backward, grad = torch.autograd.backward, torch.autograd.grad
        inside = False

        def routed(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            nonlocal inside
            if inside:  # reentrant checkpoints run a backward pass inside the backward pass
                return backward(tensors, grad_tensors, *args, **kwargs)
            inside = True
            try:
                with torch.autocast(device_type, enabled=False):
                    backward(self._scaled(tensors, grad_tensors), grad_tensors, *args, **kwargs)
            finally:
                inside = False

        def plain(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device_type, enabled=False):
                return grad(*args, **kwargs)

        torch.autograd.backward, torch.autograd.grad = routed, plain
        try:
            yield
        finally:
            torch.autograd.backward, torch.autograd.grad = backward, grad

    def _scaled(self, tensors: Any, grad_tensors: Any) -> Any:
        if self._scaler is None:
            return tensors
        if grad_tensors is not None:
            raise StepError("fp16: backward() with a gradient of its own can't be scaled")
        return self._scaler.scale(tensors)

    @contextmanager
    def _routed_step(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """`optimizer.step()` through `scaler.step(optimizer)`, which calls it in turn."""
        found = optimizer.__dict__.get("step", MISSING)
        step, scaler = optimizer.step, self._scaler
        inside = False

        @wraps(step)  # learning rate schedulers look for their mark on it
        def routed(closure: Any = None) -> Any:
            nonlocal inside
            if inside:
                return step()
            if closure is not None:
                raise StepError("fp16: an optimizer with a closure can't be scaled")
            inside = True
            try:
                self._scaled_a_step = True
                return scaler.step(optimizer)  # type: ignore[union-attr]
            finally:
                inside = False

        optimizer.step = routed  # type: ignore[method-assign]
        try:
            yield
        finally:
            if found is MISSING:
                del optimizer.__dict__["step"]
            else:
                optimizer.__dict__["step"] = found

    @contextmanager
    def _unscaled_before_clipping(self) -> Iterator[None]:
        """Both clipping functions group the gradients first, whichever way they were imported."""
        from torch.amp.grad_scaler import OptState
        from torch.nn.utils import clip_grad as module

        clip_grad: Any = module
        group = clip_grad._group_tensors_by_device_and_dtype
        scaler: Any = self._scaler

        def unscaled(*args: Any, **kwargs: Any) -> Any:
            for optimizer in self._optimizers:
                if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
                    scaler.unscale_(optimizer)
            return group(*args, **kwargs)

        clip_grad._group_tensors_by_device_and_dtype = unscaled
        try:
            yield
        finally:
            clip_grad._group_tensors_by_device_and_dtype = group


@contextmanager
def _suspended_in_steps(device_type: str) -> Iterator[None]:
    import torch
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    enabled: list[bool] = []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        enabled.append(torch.is_autocast_enabled(device_type))
        torch.set_autocast_enabled(device_type, False)
        around = {name: as_outside(one) for name, one in kwargs.items()}
        return tuple(map(as_outside, args)), around

    def as_outside(value: Any) -> Any:
        """A closure's forward pass, which runs inside the step, is no part of the suspension."""
        if not callable(value):
            return value
        outside = enabled[-1]

        @wraps(value)
        def closure(*args: Any, **kwargs: Any) -> Any:
            torch.set_autocast_enabled(device_type, outside)
            try:
                return value(*args, **kwargs)
            finally:
                torch.set_autocast_enabled(device_type, False)

        return closure

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        torch.set_autocast_enabled(device_type, enabled.pop())

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
