"""The values of parameters and gradients: held, set, and what was added to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from speedkit_jupyter.measure.checks.values.plain_tensors import or_nothing
from speedkit_jupyter.support.storage import is_in_memory


def parameters_of(holders: Sequence[Any]) -> list[Any]:
    """Of optimizers and of models."""
    parameters = []
    for holder in holders:
        if hasattr(holder, "param_groups"):
            parameters += [p for group in holder.param_groups for p in group["params"]]
        elif hasattr(holder, "parameters"):
            parameters += list(holder.parameters())
    return parameters


def set_data(parameters: Sequence[Any], values: Sequence[Any]) -> None:
    """Without raising their version, as fused optimizers do it: a graph may still be in use."""
    if len(parameters) != len(values):
        return
    for tensor, value in zip(parameters, values, strict=True):
        fits = tensor.shape == value.shape and tensor.layout is value.layout and tensor.is_leaf
        if fits and is_in_memory(tensor):
            tensor.data.copy_(value)


def zero_gradients(parameters: Sequence[Any]) -> None:
    import torch

    with torch.no_grad():
        for parameter in parameters:
            gradient = parameter.grad if parameter.is_leaf else None
            if gradient is not None and is_in_memory(gradient):
                gradient.zero_()


def dense(gradient: Any) -> Any:
    return None if gradient is None else or_nothing(gradient)


def held_values(parameter: Any) -> Any:
    """What it holds; nothing where its memory is given back for the moment."""
    import torch

    in_memory = is_in_memory(parameter)
    return parameter.detach() if in_memory else torch.empty(0, dtype=parameter.dtype)


def difference(parameter: Any, old: Any) -> Any:
    """Nothing where it has no values now, or had none."""
    now, before = or_nothing(parameter), or_nothing(old)
    return now - before if now.shape == before.shape else now.new_empty(0)


def copied(gradient: Any) -> Any:
    return None if gradient is None else dense(gradient).detach().clone()


def added(so_far: Any, now: Any, before: Any) -> Any:
    """What a backward pass added to a gradient, on top of what those before it did."""
    if now is None:
        return so_far
    new = dense(now).detach()
    new = new.clone() if before is None or before.shape != new.shape else new - before
    return new if so_far is None else so_far + new
