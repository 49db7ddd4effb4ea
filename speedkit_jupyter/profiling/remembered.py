"""What torch remembers of its own functions, where it looked while others stood in for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Where it keeps lists of them, each made once in a process (functools.cache).
MODULES = ("torch.overrides", "torch._dynamo.trace_rules")


@contextmanager
def forgotten() -> Iterator[None]:
    """Code in the block finds torch's own functions there, and what is first asked for in it is
    found out anew after it.
    """
    import torch.overrides

    torch.overrides.get_overridable_functions()
    torch.overrides.is_tensor_method_or_property(torch.Tensor.item)
    before = {id(function): _misses(function) for function in _cached()}
    try:
        yield
    finally:
        for function in _cached():
            if _misses(function) > before.get(id(function), 0):
                function.cache_clear()


def _cached() -> list[Any]:
    modules = [sys.modules[name] for name in MODULES if name in sys.modules]
    found = [value for module in modules for value in vars(module).values()]
    return [one for one in found if hasattr(one, "cache_clear") and hasattr(one, "cache_info")]


def _misses(function: Any) -> int:
    return int(function.cache_info().misses)
