"""What belongs to the whole process: torch's switches, the environment, random generators."""

from __future__ import annotations

import importlib
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from speedkit_jupyter.machines import devices, flags
from speedkit_jupyter.support.torch_private import default_device

# Name, module, the functions that read and write. `machines.flags` has the precision flags.
SWITCHES = (
    ("grad mode", "torch", "is_grad_enabled", "set_grad_enabled"),
    ("mha's fast path", "torch.backends.mha", "get_fastpath_enabled", "set_fastpath_enabled"),
    *(
        (f"the preferred {name}", "torch.backends.cuda", f"preferred_{name}", f"preferred_{name}")
        for name in ("linalg_library", "blas_library", "rocm_fa_library")
    ),
)
# Attributes of modules; cudnn's and the like are checked by their own setters.
ATTRIBUTES = {
    "torch.backends.cudnn": "enabled benchmark_limit",
    "torch.backends.mkldnn": "enabled deterministic",
    "torch.backends.opt_einsum": "enabled strategy",
    "torch.backends.quantized": "engine",
    "torch.utils.deterministic": "fill_uninitialized_memory",
}


class Setting(NamedTuple):
    """How one setting is read and written; `name` is for people."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


class Settings:
    """The values of settings at one moment; one that is not readable here is left alone."""

    def __init__(self, settings: Iterable[Setting]) -> None:
        self._values: list[tuple[Setting, Any]] = []
        for setting in settings:
            try:
                self._values.append((setting, setting.read()))
            except Exception:  # not in this version of torch, or not on this machine
                continue

    def restore(self) -> Iterator[tuple[str, str]]:
        """Write those that differ; yield the names of those that fail, and why."""
        for setting, value in self._values:
            try:
                if not _is_same(setting.read(), value):
                    with flags.allowed():
                        setting.write(value)
            except Exception as error:
                yield setting.name, failure(error)


def failure(error: Exception) -> str:
    """Return why something could not be put back, in a line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"could not be put back ({f'{type(error).__name__}: {first:.100}'.rstrip(': ')})"


def _is_same(now: Any, saved: Any) -> bool:
    if now is saved:
        return True
    if type(now) is list and type(saved) is list:
        return len(now) == len(saved) and all(map(_is_same, now, saved))
    try:
        return bool(type(now) is type(saved) and now == saved)
    except Exception:  # an object of the user's
        return False


def switches() -> Iterator[Setting]:
    """Yield what changes how a step computes: put back between rounds, too."""
    import torch

    yield Setting("torch's switches", lambda: _Known(flags.snapshot()), flags.restore)
    yield Setting("the default device", default_device, torch.set_default_device)
    yield Setting(
        "deterministic algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    )
    yield Setting(
        "anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    )
    for name, path, read, write in SWITCHES:
        yield Setting(name, _function(path, read), _function(path, write))
    for path, names in ATTRIBUTES.items():
        for name in names.split():
            yield _attribute(path, name)


class _Known(dict[Any, Any]):
    """Equal where both know a name: a library that is loaded meanwhile has others."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, dict):
            return NotImplemented
        return all(_is_same(self[name], other[name]) for name in self.keys() & other.keys())

    __hash__ = None  # type: ignore[assignment]


def _function(path: str, name: str) -> Callable[..., Any]:
    """Return a function that is looked up when it is called: a table loads nothing."""
    return lambda *given: getattr(importlib.import_module(path), name)(*given)


def _attribute(path: str, name: str) -> Setting:
    return Setting(
        f"{path}.{name}",
        lambda: getattr(sys.modules[path], name),
        lambda value: setattr(sys.modules[path], name, value),
    )


def surroundings() -> Iterator[Setting]:
    """Yield what a step may set beside: put back once, at the end."""
    yield Setting("os.environ", os.environ.copy, _write_environment)
    yield Setting("the working directory", os.getcwd, os.chdir)
    yield Setting("warnings.filters", lambda: list(warnings.filters), _write_filters)


def _write_environment(value: dict[str, str]) -> None:
    for name in os.environ.keys() - value.keys():
        del os.environ[name]
    for name, content in value.items():
        if os.environ.get(name) != content:
            os.environ[name] = content


def _write_filters(value: list[Any]) -> None:
    """Write into the same list, and have warnings look at it again."""
    warnings.filters[:] = value  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def generators() -> Iterator[Setting]:
    """Yield the process's own random generators, and those of accelerators in use."""
    import torch

    yield Setting("Python's random numbers", random.getstate, random.setstate)
    yield _of_tensors("torch's random numbers", torch.get_rng_state, torch.set_rng_state)
    if (numpy := sys.modules.get("numpy")) is not None:
        yield Setting("NumPy's random numbers", lambda: _numpy_state(numpy), numpy.random.set_state)
    for kind in devices.in_use():
        yield _of_tensors(f"{kind.name}'s random numbers", *kind.generators())


def _numpy_state(numpy: Any) -> tuple[Any, ...]:
    name, words, *rest = numpy.random.get_state()
    return name, tuple(words.tolist()), *rest


def _of_tensors(name: str, read: Callable[[], Any], write: Callable[[Any], object]) -> Setting:
    """States of torch's generators: one tensor, or one for each device."""

    def states() -> _States:
        state = read()
        return _States(state if isinstance(state, list | tuple) else [state])

    def put(value: _States) -> None:
        write(list(value) if isinstance(read(), list | tuple) else value[0])

    return Setting(name, states, put)


class _States(list[Any]):
    def __eq__(self, other: object) -> bool:
        import torch

        return isinstance(other, _States) and all(map(torch.equal, self, other))

    __hash__ = None  # type: ignore[assignment]
