"""Whose code something is: the user's, which is followed, or a library's, which is not."""

from __future__ import annotations

import re
import sys
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from speedkit_jupyter.measure.undo.handlers.base import PACKAGE

# Threads, event loops, shells and loggers: not what a step trains, and endless to walk.
MACHINERY = frozenset(
    [
        "IPython", "ipykernel", "ipywidgets", "traitlets", "comm", "zmq", "tornado",
        "jupyter_client", "asyncio", "concurrent", "multiprocessing", "threading",
        "_thread", "logging", "importlib", "_frozen_importlib", "inspect", "pytest",
        "_pytest", "pluggy", "hypothesis", "debugpy", "pdb", "bdb", "gc", "types", "abc",
    ]
) | {PACKAGE}  # fmt: skip

# Parts of torch that compile, record and communicate: their objects fit one another.
INNER_MODULES = re.compile(
    r"torch\.(_[a-z]|fx|cuda\.graphs|cuda\.streams|distributed|profiler|multiprocessing)"
)


@cache
def is_installed(package: str) -> bool:
    """Return whether a top-level package was installed, and not written by the user."""
    if package == "__main__":
        return False
    if package in sys.stdlib_module_names or package == PACKAGE:
        return True
    module = sys.modules.get(package)
    where = getattr(module, "__file__", None) or ":".join(getattr(module, "__path__", ()))
    if not where:
        return module is not None and getattr(module, "__spec__", None) is not None
    return "site-packages" in where or "dist-packages" in where


def is_the_users_class(cls: type) -> bool:
    """Return whether it was written in the notebook or in the user's own files."""
    home = cls.__dict__.get("__module__")
    if not isinstance(home, str):
        return False
    return not is_installed(home.partition(".")[0]) or _is_made_for_one(cls, home)


def _is_made_for_one(cls: type, home: str) -> bool:
    """Return whether a library made the class for one module, with parametrizations for example."""
    import torch

    if not issubclass(cls, torch.nn.Module) or "<" in cls.__qualname__:
        return False
    return not hasattr(sys.modules.get(home), cls.__qualname__.partition(".")[0])


def is_the_users_function(function: FunctionType) -> bool:
    """Return whether it was written in the notebook or in the user's own files."""
    home = function.__globals__.get("__name__")
    return not isinstance(home, str) or not is_installed(home.partition(".")[0])


def is_the_users_module(module: ModuleType) -> bool:
    """Return whether the user wrote it; False for the notebook, whose names are followed singly."""
    home: Any = vars(module).get("__name__")
    if not isinstance(home, str) or home == "__main__":
        return False
    return not is_installed(home.partition(".")[0])


def is_machinery(cls: type) -> bool:
    """Return whether instances of a class are left alone, and not looked into."""
    import torch

    home = cls.__dict__.get("__module__", "builtins")
    if not isinstance(home, str):
        return False
    if INNER_MODULES.match(home):
        return not issubclass(cls, torch.nn.Module | torch.Tensor | torch.optim.Optimizer)
    return home.partition(".")[0] in MACHINERY


def is_machinerys_function(function: FunctionType) -> bool:
    """Return whether the function is part of a compiler, a shell or the like."""
    home = function.__globals__.get("__name__")
    if not isinstance(home, str):
        return False
    return bool(INNER_MODULES.match(home)) or home.partition(".")[0] in MACHINERY
