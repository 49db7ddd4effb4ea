"""A plain step under a plan: autocast and SDPA reach its forward passes at run time.

`loss_fn(model(x), y).backward()` is one statement, so what must surround the forward pass
surrounds the whole step, and is suspended inside the backward pass and the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.context import SpeedContext
from speedkit_jupyter.exceptions import StepError

if TYPE_CHECKING:
    import torch


@contextmanager
def routed(context: SpeedContext) -> Iterator[None]:
    """Run the block's forward passes under the context's plan.

    Raises StepError for a plan with loss scaling: the step itself must call the scaler.
    """
    import torch

    if context.plan["grad_scaler"].active:
        raise StepError(
            "loss scaling must stand in the step: with ctx.autocast(): …; "
            "ctx.grad_scaler.scale(loss).backward(); ctx.grad_scaler.step(optimizer); "
            "ctx.grad_scaler.update()"
        )
    with ExitStack() as stack:
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(context.sdpa())
        if context.plan["precision"].active:
            stack.enter_context(_suspended_in_backward(context.device.type))
            stack.enter_context(_suspended_in_steps(context.device.type))
            stack.enter_context(context.autocast())
        yield


@contextmanager
def _suspended_in_backward(device_type: str) -> Iterator[None]:
    import torch

    backward, grad = torch.autograd.backward, torch.autograd.grad

    def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device_type, enabled=False):
                return function(*args, **kwargs)

        return call

    torch.autograd.backward, torch.autograd.grad = plainly(backward), plainly(grad)
    try:
        yield
    finally:
        torch.autograd.backward, torch.autograd.grad = backward, grad


@contextmanager
def _suspended_in_steps(device_type: str) -> Iterator[None]:
    import torch
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    enabled: list[bool] = []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(callable(one) for one in (*args, *kwargs.values())):
            raise StepError("an optimizer with a closure runs its forward pass inside its step")
        enabled.append(torch.is_autocast_enabled(device_type))
        torch.set_autocast_enabled(device_type, False)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        torch.set_autocast_enabled(device_type, enabled.pop())

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
