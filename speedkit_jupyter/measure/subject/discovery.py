"""What a step's code can reach: models, optimizers, and what else may change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.undo.walk import Walk
from speedkit_jupyter.support.wrappers import each_once, is_wrapper, unwrapped

if TYPE_CHECKING:
    import torch


def reached(values: Iterable[Any]) -> list[Any]:
    """The values and what lies behind them: a function's globals and closure, an object's parts.

    Without what only the methods of a class name, unless there is no model otherwise. Nothing is
    run and no attribute is computed: only dictionaries, slots and cells are read.
    """
    walk = Walk(values)
    return walk.near if outermost(walk.near) else list(walk.found.values())


def outermost(objects: Sequence[Any]) -> list[torch.nn.Module]:
    """The models among objects that have parameters and are not part of another."""
    import torch

    modules = [module for module in objects if issubclass(type(module), torch.nn.Module)]
    inside = {id(part) for module in modules for part in list(module.modules())[1:]}
    return [m for m in modules if id(m) not in inside and next(m.parameters(), None) is not None]


NO_PARAMETERS = (
    "the model in this step has no parameters, since its weights are quantized: no plan changes it"
)


def is_quantized(objects: Iterable[Any]) -> bool:
    """Whether a module is among objects whose weights are packed, and are no parameters."""
    import torch

    modules = [module for module in objects if issubclass(type(module), torch.nn.Module)]
    return any(
        ".quantized." in type(part).__module__ for module in modules for part in module.modules()
    )


def bystanders_among(objects: Sequence[Any], known: Sequence[Any]) -> list[Any]:
    """The modules and optimizers among objects that are none of the known, nor part of them, nor
    wrappers of them.
    """
    import torch

    inside = {id(value) for value in (*known, *map(unwrapped, known))}
    for value in (*known, *objects):
        if issubclass(type(value), torch.nn.Module):
            inside.update(id(part) for part in list(value.modules())[1:])
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    rest = [
        value for value in objects if issubclass(type(value), kinds) and id(value) not in inside
    ]
    return [value for value in rest if id(unwrapped(value)) not in inside and not _is_shell(value)]


def _is_shell(optimizer: Any) -> bool:
    """Whether it is an optimizer that only passes on to another: that one is reached as well."""
    import torch

    return issubclass(type(optimizer), torch.optim.Optimizer) and is_wrapper(optimizer)


def optimizers_among(objects: Sequence[Any]) -> list[torch.optim.Optimizer]:
    """The optimizers among objects, those behind wrappers."""
    import torch

    return each_once(
        optimizer for optimizer in objects if issubclass(type(optimizer), torch.optim.Optimizer)
    )


def holding(
    optimizers: Iterable[torch.optim.Optimizer], model: torch.nn.Module
) -> list[torch.optim.Optimizer]:
    """The optimizers that hold a parameter of the model, each once and without its wrapper."""
    parameters = {id(p) for p in model.parameters()}
    return [
        optimizer
        for optimizer in each_once(optimizers)
        if any(id(p) in parameters for group in optimizer.param_groups for p in group["params"])
    ]


def holds(optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module]) -> bool:
    """Whether it holds a parameter of one of the models."""
    return any(holding([optimizer], model) for model in models)
