"""Which optimizers need gradients that are contiguous in memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# What makes a tensor flat and raises where its elements do not lie in their usual order.
FLATTENING = {"view", "parameters_to_vector", "vector_to_parameters"}


def flattens(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a method of its own calls `.view` or torch's vectors of parameters, as LBFGS does."""
    import torch

    kinds = type(optimizer).__mro__
    own = kinds[: kinds.index(torch.optim.Optimizer)] if torch.optim.Optimizer in kinds else kinds
    return any(map(_flattens, own))


@lru_cache(maxsize=256)
def _flattens(kind: type) -> bool:
    methods = [inspect.unwrap(one) for one in vars(kind).values() if inspect.isfunction(one)]
    return any(FLATTENING & {*code.co_names} for m in methods for code in _codes(m.__code__))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield it, and those of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
