"""Classify code and objects: the user's, a library's, machinery, or state in other threads."""

from __future__ import annotations

import re
import sys
import threading
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from types import AsyncGeneratorType, CoroutineType, FunctionType
from typing import Any

PACKAGE = __name__.partition(".")[0]
# Machinery: packages for threads, event loops, shells and logging, which are not part of a step.
MACHINERY = frozenset([
    "IPython", "ipykernel", "ipywidgets", "traitlets", "comm", "zmq", "tornado", "jupyter_client",
    "asyncio", "concurrent", "multiprocessing", "threading", "_thread", "logging", "importlib",
    "_frozen_importlib", "inspect", "pytest", "_pytest", "pluggy", "hypothesis", "debugpy", "pdb",
    "bdb", "gc", "types", "abc", PACKAGE,
])  # fmt: skip
# Exceptions to MACHINERY: objects of these modules hold values that processes share.
SHARED = ("multiprocessing.shared_memory", "multiprocessing.sharedctypes")
# Restoring objects of these parts of torch (compilers, CUDA graphs, communication) breaks them.
INNER_MODULES = re.compile(
    r"torch\.(_[a-z]|fx|cuda\.graphs|cuda\.streams|distributed|profiler|multiprocessing)"
)
# Objects of these modules work with another thread or process.
CHANNELS = (
    "concurrent.futures", "multiprocessing.queues", "multiprocessing.managers",
    "multiprocessing.connection", "multiprocessing.pool", "subprocess",
)  # fmt: skip


@cache
def is_installed(module_name: str) -> bool:
    """Return whether a module belongs to Python, SpeedKit or an installed package."""
    package = module_name.partition(".")[0]
    if package in sys.stdlib_module_names or package == PACKAGE:
        return True
    module = None if package == "__main__" else sys.modules.get(package)
    where = getattr(module, "__file__", None) or ":".join(getattr(module, "__path__", ()))
    if module is None and package != "__main__":  # the module is not loaded
        with suppress(ImportError, ValueError):
            spec = find_spec(package)
            where = str(spec.origin or spec.submodule_search_locations) if spec else ""
    if not where:
        return getattr(module, "__spec__", None) is not None
    return "site-packages" in where or "dist-packages" in where


def is_ours(home: Any) -> bool:
    """Return whether `home`, the name of a module, belongs to SpeedKit."""
    return str(home).partition(".")[0] == PACKAGE


def is_the_users_class(cls: type) -> bool:
    """Return whether a class was written in the notebook or in the user's own files."""
    home = cls.__dict__.get("__module__")
    return isinstance(home, str) and not is_installed(home)


def is_the_users_function(function: FunctionType) -> bool:
    """Return whether a function was written in the notebook or in the user's own files."""
    home = function.__globals__.get("__name__")
    return not isinstance(home, str) or not is_installed(home)


def is_machinery(home: Any) -> bool:
    """Return whether `home` names a module of INNER_MODULES or MACHINERY, but not of SHARED."""
    if not isinstance(home, str) or home in SHARED:
        return False
    return bool(INNER_MODULES.match(home)) or home.partition(".")[0] in MACHINERY


def is_elsewhere(cls: type) -> bool:
    """Return whether instances of `cls` have state in another thread, process or event loop."""
    if issubclass(cls, (CoroutineType, AsyncGeneratorType, BaseProcess)):
        return True
    return str(cls.__module__).startswith(CHANNELS)


def works_elsewhere(attributes: dict[str, Any]) -> bool:
    """Return whether an object with these attributes owns a thread, process or channel."""
    parts = list(attributes.values())
    for value in [value for value in parts if type(value) is list or type(value) is tuple]:
        parts += value[:1]  # check only the first element of a list, such as a list of workers
    return any(issubclass(type(p), threading.Thread) or is_elsewhere(type(p)) for p in parts)
