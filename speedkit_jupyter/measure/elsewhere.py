"""Steps that compute in another thread, where the autocast of the thread that measures is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.exceptions import StepError

if TYPE_CHECKING:
    import torch

ELSEWHERE = (
    "the step computes in another thread, which autocast does not reach: use ctx.autocast() "
    "inside it"
)


@contextmanager
def refused(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Raises StepError after the block where the models were called in other threads only."""
    from torch.nn import Module

    watched, here = {id(one) for one in models}, threading.get_ident()
    called_here: set[bool] = set()
    owner: Any = Module
    original = owner.__call__

    @wraps(original)
    def noting(module: Any, *args: Any, **kwargs: Any) -> Any:
        if id(module) in watched:
            called_here.add(threading.get_ident() == here)
        return original(module, *args, **kwargs)

    owner.__call__ = noting
    try:
        yield
    finally:
        owner.__call__ = original
    if called_here == {False}:
        raise StepError(ELSEWHERE)
