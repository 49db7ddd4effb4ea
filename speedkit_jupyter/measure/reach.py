"""What a step's code can reach: models, optimizers, schedulers, lists, counters."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any


def reached(values: Iterable[Any], depth: int = 4) -> list[Any]:
    """The values and what lies behind them: a function's globals and closure, an object's parts.

    Nothing is run and no attribute is computed: only dictionaries and cells are read.
    """
    found: dict[int, Any] = {}
    for value in values:
        _reach(value, found, depth)
    return list(found.values())


def _reach(value: Any, found: dict[int, Any], depth: int) -> None:
    """Functions lead to their globals and closures, plain objects to what they hold."""
    if id(value) in found or depth == 0 or isinstance(value, ModuleType):
        return
    found[id(value)] = value
    if isinstance(value, MethodType):
        _reach(value.__self__, found, depth)
        value = value.__func__
    if isinstance(value, FunctionType):
        variables = inspect.getclosurevars(value)
        for one in (*variables.nonlocals.values(), *variables.globals.values()):
            _reach(one, found, depth - 1)
    elif isinstance(value, list | tuple) and len(value) <= 32:
        for one in value:
            _reach(one, found, depth - 1)
    elif isinstance(value, dict) and len(value) <= 32:
        for one in list(value.values()):
            _reach(one, found, depth - 1)
    elif _is_the_users(value):
        for one in list(vars(value).values()):
            _reach(one, found, depth - 1)


def _is_the_users(value: Any) -> bool:
    """An instance of a class that was written in the notebook or in the user's own files."""
    import torch

    home = type(value).__module__.partition(".")[0]
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, type | torch.nn.Module | torch.Tensor)
        and home not in ("torch", "numpy", "builtins", "IPython", "speedkit_jupyter")
    )
