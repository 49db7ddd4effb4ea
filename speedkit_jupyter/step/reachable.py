"""Find the models and optimizers that a step can reach."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from speedkit_jupyter.state.walk import Walk
from speedkit_jupyter.support.wrappers import each_once


def reached(values: Iterable[Any]) -> list[Any]:
    """Return the values and the objects reachable from them, without running the user's code.

    Objects that are reachable only through classes or whole namespaces are left out, unless no
    model is found without them.
    """
    walk = Walk(values)
    return walk.near if outermost(walk.near) else list(walk.found.values())


def outermost(objects: Iterable[Any]) -> list[torch.nn.Module]:
    """Return the models that have parameters and are not part of another model."""
    modules = _all_of(torch.nn.Module, objects)
    inside = {id(part) for module in modules for part in list(module.modules())[1:]}
    return [m for m in modules if id(m) not in inside and any(True for _ in m.parameters())]


def bystanders_among(objects: Sequence[Any], known: Sequence[Any]) -> list[Any]:
    """Return the distinct unwrapped modules and optimizers, except submodules and `known` ones."""
    modules, inside = each_once(_all_of(torch.nn.Module, objects)), {*map(id, each_once(known))}
    for module in (*_all_of(torch.nn.Module, each_once(known)), *modules):
        inside.update(id(part) for part in list(module.modules())[1:])
    every = [*modules, *optimizers_among(objects)]
    return [one for one in every if id(one) not in inside]


def optimizers_among(objects: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """Return the distinct unwrapped optimizers among objects."""
    return each_once(_all_of(torch.optim.Optimizer, objects))


def holding(optimizers: Iterable[Any], model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return the distinct unwrapped optimizers that hold a parameter of the model."""
    return [optimizer for optimizer in each_once(optimizers) if holds(optimizer, [model])]


def holds(optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module]) -> bool:
    """Return whether an optimizer holds a parameter of one of the models."""
    parameters = {id(p) for model in models for p in model.parameters()}
    return any(id(p) in parameters for group in optimizer.param_groups for p in group["params"])


def _all_of(kind: Any, objects: Iterable[Any]) -> list[Any]:
    """Return the instances of a class, without `isinstance`, which could run the user's code."""
    return [value for value in objects if issubclass(type(value), kind)]
