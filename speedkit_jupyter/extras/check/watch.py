"""Watches for what a call replaces in this process: clocks, torch's functions, our own, switches.

What ran before the watch began is not seen, and nothing in a process can hold out against code of
the same process that means to deceive: a process of the candidate's own does.
"""

from __future__ import annotations

import builtins
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from speedkit_jupyter.machines import flags

PACKAGE = __name__.partition(".")[0]
# torch.compile replaces these of modules, which compute nothing.
UNWATCHED = ("__init__", "__setstate__")
CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "process_time", "time")


class PatchWatch:
    """Names what differs from when it was made, and puts it back.

    Beside torch's and our own it watches the `reference`, and the functions of its file.
    """

    def __init__(self, reference: Any = None) -> None:
        module = sys.modules.get(type(reference).__module__, builtins)
        scope = getattr(reference, "__globals__", vars(module))
        owners: list[tuple[str, Mapping[str, Any], Callable[[str, Any], None]]] = [
            *((f"{one.__name__}.", vars(one), partial(setattr, one)) for one in _owners()),
            ("the reference's ", scope, scope.__setitem__),
        ]
        self._before = [(*owner, _callables(owner[1])) for owner in owners]
        functions = [one for one in (reference, *scope.values()) if inspect.isfunction(one)]
        self._codes = [(one, one.__code__) for one in functions]
        self._switches, self._grad = flags.snapshot(), torch.is_grad_enabled()
        # Of what was replaced before, only that of functions written in C can be told.
        self._late = [one for one in CLOCKS if type(getattr(time, one)) is not type(time.sleep)]

    def changes(self) -> list[str]:
        """Return a line for each function that was replaced and switch that was changed."""
        faults = [f"time.{name} is not Python's own" for name in self._late]
        for label, names, put_back, before in self._before:
            for name, value in before.items():
                if not _is_same(names.get(name), value):
                    faults.append(f"it replaces {label}{name}")
                    put_back(name, dict(value) if isinstance(value, dict) else value)
        for function, code in self._codes:
            if function.__code__ is not code:
                faults.append(f"it replaces the code of {function.__name__}")
                function.__code__ = code
        found = flags.diff(self._switches, flags.snapshot())
        faults += [f"it changes the switch {one.name} to {one.after}" for one in found]
        if found:
            flags.restore(self._switches)
        if torch.is_grad_enabled() != self._grad:
            faults.append("it switches gradients on or off for all that follows")
            torch.set_grad_enabled(self._grad)
        return faults


def _owners() -> Iterator[Any]:
    """Yield the modules and classes that a judgement or a reference stands on."""
    yield from (builtins, time, torch, torch.linalg, torch.autograd, torch.random, torch.cuda)
    yield from (torch.accelerator, torch.nn.functional, torch.Tensor, torch.nn.Module)
    yield from (torch.nn.Linear, torch.nn.LayerNorm, torch.autograd.Function)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == PACKAGE and module is not None:
            yield module
            own = (one for one in vars(module).values() if isinstance(one, type))
            yield from (one for one in own if one.__module__ == name)


def _callables(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return its functions, classes and other descriptors as they are written, and constants.

    A dict whose name begins with _ is no constant: a module remembers something there.
    """
    found = {}
    for name, value in names.items():
        is_code = callable(value) or isinstance(value, staticmethod | classmethod | property)
        is_constant = name.isupper() and isinstance(value, int | float | tuple | dict)
        is_memory = isinstance(value, dict) and name.startswith("_")
        if name not in UNWATCHED and (is_code or (is_constant and not is_memory)):
            found[name] = dict(value) if isinstance(value, dict) else value
    return found


def _is_same(now: Any, before: Any) -> bool:
    """Return whether it is the one before, or what torch.compile put around that."""
    if now is before or (isinstance(before, dict) and now == before):
        return True

    code, folder = getattr(now, "__code__", None), str(Path(torch.__file__).parent)
    is_torchs = code is not None and code.co_filename.startswith(folder)
    return is_torchs and inspect.unwrap(now) is before
