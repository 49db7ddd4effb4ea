"""Watches for what a call replaces in this process: clocks, torch's functions, our own, switches.

What ran before the watch began is not seen, and nothing in a process can hold out against code of
the same process that means to deceive: a process of the candidate's own does.
"""

from __future__ import annotations

import builtins
import inspect
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from speedkit_jupyter.machines import flags
from speedkit_jupyter.torchglue.modules import BUFFERS, MODULES, PARAMETERS
from speedkit_jupyter.torchglue.private import innermost_dispatch_mode, innermost_function_mode

PACKAGE = __name__.partition(".")[0]
# torch.compile replaces these of modules, which compute nothing.
UNWATCHED = ("__init__", "__setstate__")
CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "process_time", "time")
# What a module computes with, in its own dicts.
OF_MODULES = (PARAMETERS, BUFFERS, MODULES, "training")
MODES = (innermost_function_mode, innermost_dispatch_mode)
MISSING = object()
TORCH = str(Path(torch.__file__).parent)


class Items(NamedTuple):
    """A dict, and what it held."""

    owner: dict[Any, Any]
    values: dict[Any, Any]


class PatchWatch:
    """Names what differs from when it was made, and puts it back.

    Beside torch's and our own it watches the `reference`, and the functions of its file.
    """

    def __init__(self, reference: Any = None) -> None:
        module = sys.modules.get(type(reference).__module__, builtins)
        scope = getattr(reference, "__globals__", vars(module))
        parts = [*reference.modules()] if isinstance(reference, torch.nn.Module) else []
        owners = [*_owners(), *{kind for part in parts for kind in type(part).__mro__[:-1]}]
        every = [(f"{one.__name__}.", one, vars(one)) for one in owners]
        every += [("the reference's ", one, vars(one)) for one in parts]
        every.append(("the reference's ", scope, scope))
        self._before = [(*one, _watched(one[-1]), {*one[-1]}) for one in every]
        functions = [one for one in (reference, *scope.values()) if inspect.isfunction(one)]
        self._codes = [(one, one.__code__) for one in functions]
        self._switches, self._grad = flags.snapshot(), torch.is_grad_enabled()
        self._anomaly, self._modes = torch.is_anomaly_enabled(), [one() for one in MODES]
        # Of what was replaced before, a function that is not Python's own can be told.
        clocks = ((one, getattr(time, one)) for one in CLOCKS)
        self._late = [n for n, f in clocks if not inspect.isbuiltin(f) or f.__name__ != n]

    def changes(self) -> list[str]:
        """Return a line for each function that was replaced and switch that was changed."""
        faults = [f"time.{name} is not Python's own" for name in self._late]
        for label, owner, names, before, known in self._before:
            pairs = ((name, names.get(name), old) for name, old in before.items())
            found = [name for name, now, old in pairs if now is not old and not _is_same(now, old)]
            # A new name counts where it hides another: in a class, and of a function of Python's.
            hides = isinstance(owner, type | torch.nn.Module)
            new = {n: names[n] for n in names.keys() - known if hides or n in vars(builtins)}
            for name in (*found, *_watched(new)):
                faults.append(f"it replaces {label}{name}")
                _put_back(owner, name, before.get(name, MISSING))
        for function, code in self._codes:
            if function.__code__ is not code:
                faults.append(f"it replaces the code of {function.__name__}")
                function.__code__ = code
        switched = flags.diff(self._switches, flags.snapshot())
        faults += [f"it changes the switch {one.name} to {one.after}" for one in switched]
        if switched:
            flags.restore(self._switches)
        if torch.is_grad_enabled() != self._grad:
            faults.append("it switches gradients on or off for all that follows")
            torch.set_grad_enabled(self._grad)
        if torch.is_anomaly_enabled() != self._anomaly:
            faults.append("it switches the detection of anomalies on or off")
            torch.autograd.set_detect_anomaly(self._anomaly)
        for innermost, before in zip(MODES, self._modes, strict=True):
            while (mode := innermost()) not in (None, before):
                faults.append(f"it leaves the mode {type(mode).__name__} on")
                mode.__exit__(None, None, None)
        return faults


def _owners() -> Iterator[Any]:
    """Yield the modules and classes that a judgement or a reference stands on."""
    yield from (builtins, math, time, torch, torch.linalg, torch.autograd, torch.random, torch.cuda)
    yield from (torch.accelerator, torch.nn.functional, torch.Tensor, torch.nn.Module)
    yield from (torch.nn.modules.module, torch.nn.Linear, torch.nn.LayerNorm, torch.nn.Parameter)
    yield from (torch.autograd.Function,)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == PACKAGE and module is not None:
            yield module
            own = (one for one in vars(module).values() if isinstance(one, type))
            yield from (one for one in own if one.__module__ == name)


def _watched(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return its functions, classes, modules and descriptors as they are written, constants, and
    what modules of torch compute with.

    A dict whose name begins with _ is no constant: a module remembers something there.
    """
    found = {}
    for name, value in names.items():
        is_code = callable(value) or isinstance(value, staticmethod | classmethod | property)
        is_constant = name.isupper() and isinstance(value, int | float | tuple | dict)
        is_memory = isinstance(value, dict) and name.startswith("_")
        is_own = name in OF_MODULES or (name.endswith("hooks") and is_memory)
        is_code = is_code or isinstance(value, ModuleType) or (is_constant and not is_memory)
        if name not in UNWATCHED and (is_code or is_own):
            found[name] = Items(value, dict(value)) if isinstance(value, dict) else value
    return found


def _is_same(value: Any, old: Any) -> bool:
    """Return whether a value is the one before, or what torch.compile put around that."""
    if isinstance(old, Items):
        is_same = isinstance(value, dict) and list(value) == list(old.values)
        return is_same and all(value[key] is one for key, one in old.values.items())
    code: Any = getattr(value, "__code__", None)
    is_torchs = inspect.iscode(code) and code.co_filename.startswith(TORCH)
    return is_torchs and inspect.unwrap(value) is old


def _put_back(owner: Any, name: str, value: Any) -> None:
    """Make a name of a module, a class or a scope what it was."""
    if isinstance(value, Items):
        value.owner.clear()
        value.owner.update(value.values)
        value = value.owner
    if isinstance(owner, dict):
        owner.pop(name, None) if value is MISSING else owner.__setitem__(name, value)
    elif isinstance(owner, torch.nn.Module):
        _put_back(vars(owner), name, value)
    elif value is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
