"""Whose code something is: the user's, which is followed, or a library's, which is not."""

from __future__ import annotations

import sys
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import PACKAGE

# Threads, event loops, shells and loggers: not what a step trains, and endless to walk.
MACHINERY = frozenset(
    [
        "IPython", "ipykernel", "ipywidgets", "traitlets", "comm", "zmq", "tornado",
        "jupyter_client", "asyncio", "concurrent", "multiprocessing", "threading",
        "_thread", "logging", "importlib", "_frozen_importlib", "inspect", "pytest",
        "_pytest", "pluggy", "hypothesis", "debugpy", "pdb", "bdb", "gc", "types", "abc",
    ]
) | {PACKAGE}  # fmt: skip

# Of these: what is a user's own state, and leads no further.
HANDED_OUT = (
    "asyncio.queues", "asyncio.locks", "multiprocessing.shared_memory",
    "multiprocessing.sharedctypes", "multiprocessing.synchronize",
)  # fmt: skip

# Of torch: what compiles, records and communicates, whose parts fit one another.
INNER_MODULES = (
    "torch._dynamo", "torch._inductor", "torch._functorch", "torch._subclasses", "torch._ops",
    "torch._higher_order_ops", "torch._library", "torch.fx", "torch.cuda.graphs",
    "torch.cuda.streams", "torch.distributed", "torch.profiler", "torch.multiprocessing",
)  # fmt: skip


@cache
def is_installed(package: str) -> bool:
    """Whether a top-level package came from elsewhere, and was not written by the user."""
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
    """Written in the notebook or in the user's own files."""
    home = cls.__dict__.get("__module__")
    if not isinstance(home, str):
        return False
    return not is_installed(home.partition(".")[0]) or _is_made_for_one(cls, home)


def _is_made_for_one(cls: type, home: str) -> bool:
    """A module's own class, which a library has made of it: with parametrizations, say."""
    import torch

    if not issubclass(cls, torch.nn.Module) or "<" in cls.__qualname__:
        return False
    first = cls.__qualname__.partition(".")[0]
    return not hasattr(sys.modules.get(home), first)


def is_the_users_function(function: FunctionType) -> bool:
    """Written in the notebook or in the user's own files."""
    home = function.__globals__.get("__name__")
    return not isinstance(home, str) or not is_installed(home.partition(".")[0])


def is_installed_code(code: CodeType) -> bool:
    """Whether it stands in a package's file, whatever it calls its module."""
    return "site-packages" in code.co_filename or "dist-packages" in code.co_filename


def is_the_users_module(module: ModuleType) -> bool:
    """The user's own, also one without a file; not the notebook, whose names are followed one by
    one.
    """
    home: Any = vars(module).get("__name__")
    if not isinstance(home, str) or home == "__main__":
        return False
    return not is_installed(home.partition(".")[0])


def is_machinery(cls: type) -> bool:
    """Whether instances of a class are left alone, and not looked into."""
    import torch

    home = cls.__dict__.get("__module__", "builtins")
    if not isinstance(home, str):
        return False
    if home.startswith(INNER_MODULES):
        return not issubclass(cls, torch.nn.Module | torch.Tensor | torch.optim.Optimizer)
    return home.partition(".")[0] in MACHINERY and not home.startswith(HANDED_OUT)


def is_machinerys_function(function: FunctionType) -> bool:
    """Whether a function's closure holds parts of a compiler, say."""
    home = function.__globals__.get("__name__")
    if not isinstance(home, str):
        return False
    return home.startswith(INNER_MODULES) or home.partition(".")[0] in MACHINERY
