"""How the user calls things: cells by their numbers, models by their variables."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


def cells() -> dict[str, str]:
    """How the notebook calls the files that its cells are to Python; nothing outside of one."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return {file: f"cell {number}" for file, number in numbers.items()}


def models_of(step: Callable[..., object]) -> dict[int, str]:
    """The variables of models by the models' ids, where the function was defined."""
    import torch

    function = inspect.unwrap(step)
    names: dict[str, Any] = dict(getattr(function, "__globals__", {}))
    cells = getattr(function, "__closure__", None) or ()
    free = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(free, cells, strict=False):
        try:
            names[name] = cell.cell_contents
        except ValueError:  # still empty
            continue
    return {
        id(value): name
        for name, value in reversed(names.items())
        if isinstance(value, torch.nn.Module) and not name.startswith("_")
    }
