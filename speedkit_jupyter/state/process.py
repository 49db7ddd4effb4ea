"""Settings of the whole process: torch's switches, the environment, random generators."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from speedkit_jupyter.catalog.malloc import NAME as HEAP
from speedkit_jupyter.machines import devices, flags
from speedkit_jupyter.state.handlers.values import comparable
from speedkit_jupyter.support.exceptions import in_a_line

# Attributes of modules; `machines.flags` has the precision flags.
ATTRIBUTES = {
    "torch.backends.cudnn": "enabled benchmark_limit",
    "torch.backends.mkldnn": "enabled deterministic",
    "torch.backends.opt_einsum": "enabled strategy",
    "torch.backends.quantized": "engine",
    "torch.utils.deterministic": "fill_uninitialized_memory",
}


class Setting(NamedTuple):
    """One setting, with functions that read and write it; `name` is for people."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    same: Callable[[Any, Any], bool] = lambda now, saved: bool(now == saved)


class ProcessSettings:
    """The values of settings at one moment; one that is not readable here is left alone."""

    def __init__(self, settings: Iterable[Setting]) -> None:
        self._values: list[tuple[Setting, Any]] = []
        for setting in settings:
            with suppress(Exception):  # not in this version of torch, or not on this machine
                self._values.append((setting, setting.read()))

    def changed(self) -> bool:
        """Return whether one of them has another value now."""
        return any(not setting.same(setting.read(), value) for setting, value in self._values)

    def moved(self) -> bool:
        """Return the same of random generators, which takes too long to ask after each step."""
        return any(comparable(one.read()) != comparable(value) for one, value in self._values)

    def restore(self) -> Iterator[tuple[str, str]]:
        """Write those that differ; yield the names of those that fail, and why."""
        for setting, value in self._values:
            try:
                if not setting.same(setting.read(), value):
                    setting.write(value)
            except Exception as error:
                yield setting.name, f"could not be put back ({in_a_line(error)})"


def switches() -> Iterator[Setting]:
    """Yield what changes how a step computes: put back between rounds, too."""
    yield Setting("torch's switches", _flags, flags.restore, lambda a, b: not flags.diff(b, a))
    yield Setting("gradient mode", torch.is_grad_enabled, torch.set_grad_enabled)
    yield Setting(
        "the default device",
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    )
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
    for path, names in ATTRIBUTES.items():
        module = sys.modules.get(path)
        for name in names.split():
            read, write = partial(getattr, module, name), partial(setattr, module, name)
            yield Setting(f"{path}.{name}", read, write)


def _flags() -> dict[str, Any]:
    """Return torch's flags, without the one for the heap: steps don't set it, and it is slow."""
    return {name: value for name, value in flags.snapshot().items() if name != HEAP}


def surroundings() -> Iterator[Setting]:
    """Yield further settings that a step may change; they are put back once, at the end."""
    yield Setting("os.environ", os.environ.copy, _write_environment)
    yield Setting("the working directory", os.getcwd, os.chdir)
    yield Setting("warnings.filters", lambda: list(warnings.filters), _write_filters)


def _write_environment(value: dict[str, str]) -> None:
    for name in os.environ.keys() - value.keys():  # never empty: other threads read it
        del os.environ[name]
    # Threads of C++ code read it, too: variables without a change are not written.
    os.environ.update({name: v for name, v in value.items() if os.environ.get(name) != v})


def _write_filters(value: list[Any]) -> None:
    warnings.filters[:] = value  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put the random generators of the process back at the end: the user's draws go on."""
    found = ProcessSettings(generators())
    try:
        yield
    finally:
        list(found.restore())


def generators() -> Iterator[Setting]:
    """Yield the random generators of the process and of accelerators; comparing takes too long."""
    ways: list[tuple[str, Any, Any]] = [
        ("Python's", random.getstate, random.setstate),
        ("torch's", torch.get_rng_state, torch.set_rng_state),
        ("NumPy's", np.random.get_state, np.random.set_state),
    ]
    ways += [(f"{kind.name}'s", *kind.generators()) for kind in devices.in_use()]
    for name, read, write in ways:
        yield Setting(f"{name} random numbers", read, write, lambda now, saved: False)
