"""Which optimizers need gradients that are contiguous in memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# What makes a tensor flat and raises where its elements do not lie in their usual order.
FLATTENING = {"view", "parameters_to_vector", "vector_to_parameters"}


def flattens(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its own code calls `.view` or torch's vectors of parameters, as LBFGS does.

    Read from the compiled code of the class, its bases below torch's Optimizer, and the
    functions of the same module that they call.
    """
    import torch

    kinds = type(optimizer).__mro__
    own = kinds[: kinds.index(torch.optim.Optimizer)] if torch.optim.Optimizer in kinds else kinds
    return any(_flattens(kind) for kind in own)


@lru_cache(maxsize=256)
def _flattens(kind: type) -> bool:
    waiting = [
        inspect.unwrap(function) for function in vars(kind).values() if inspect.isfunction(function)
    ]
    codes: set[Any] = set()
    while waiting:
        function = waiting.pop()
        for code in _codes(function.__code__):
            if code in codes:
                continue
            codes.add(code)
            if FLATTENING & set(code.co_names):
                return True
            called = (function.__globals__.get(name) for name in code.co_names)
            waiting += [
                function
                for function in map(_unwrapped, called)
                if inspect.isfunction(function) and function.__module__ == kind.__module__
            ]
    return False


def _unwrapped(value: Any) -> Any:
    return inspect.unwrap(value) if inspect.isfunction(value) else value


def _codes(code: CodeType) -> Iterator[CodeType]:
    """It, and those of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
