"""What belongs to the whole process: torch's switches, random generators, the environment."""

from __future__ import annotations

import decimal
import gc
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from speedkit_jupyter import flags

Restore = Callable[[], None]


class Setting(NamedTuple):
    """How one is read and written; `name` is for people."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


class Settings:
    """The values of settings at one moment; what is not readable here is left alone."""

    def __init__(self, settings: list[Setting]) -> None:
        self._values: list[tuple[Setting, Any]] = []
        for one in settings:
            try:
                self._values.append((one, one.read()))
            except Exception:  # not in this version of torch, or not on this machine
                continue

    def restore(self) -> Iterator[tuple[str, Exception]]:
        """Write those that are otherwise; gives what fails."""
        for one, value in self._values:
            try:
                if one.read() != value:
                    one.write(value)
            except Exception as error:
                yield one.name, error

    def difference(self) -> str:
        """The first that is otherwise."""
        return next((one.name for one, value in self._values if one.read() != value), "")


def switches() -> list[Setting]:
    """What changes how a step computes: put back between rounds, too."""
    import torch

    return [
        Setting("torch's switches", flags.snapshot, flags.restore),
        Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
        Setting(
            "deterministic algorithms",
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        Setting(
            "anomaly mode",
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda value: torch.autograd.set_detect_anomaly(*value),
        ),
        Setting("flush_denormal", _flushes_denormals, torch.set_flush_denormal),
        Setting("default device", _default_device, torch.set_default_device),
        Setting(
            "multithreaded backward",
            torch._C._is_multithreading_enabled,
            torch._C._set_multithreading_enabled,
        ),
        *(
            Setting(f"{module}.{name}", *_attribute(f"torch.backends.{module}", name))
            for module, name in (
                ("cudnn", "enabled"), ("cudnn", "benchmark_limit"), ("mkldnn", "enabled"),
                ("mkldnn", "deterministic"), ("opt_einsum", "enabled"),
                ("opt_einsum", "strategy"), ("quantized", "engine"),
            )
        ),
        Setting(
            "fill_uninitialized_memory",
            *_attribute("torch.utils.deterministic", "fill_uninitialized_memory"),
        ),
    ]  # fmt: skip


def surroundings() -> list[Setting]:
    """What a step may set beside: put back once, at the end."""
    import torch

    return [
        Setting("os.environ", os.environ.copy, _write_environment),
        Setting("the working directory", os.getcwd, os.chdir),
        Setting("sys.path", lambda: [*sys.path], lambda value: _fill(sys.path, value)),
        Setting("sys.argv", lambda: [*sys.argv], lambda value: _fill(sys.argv, value)),
        Setting("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
        Setting("gc", lambda: (gc.get_threshold(), gc.isenabled()), _write_gc),
        Setting("warnings' filters", lambda: [*warnings.filters], _write_filters),
        Setting("levels of loggers", _levels, _write_levels),
        Setting("decimal's context", decimal.getcontext().copy, decimal.setcontext),
        Setting("warn_always", torch.is_warn_always_enabled, torch.set_warn_always),
        Setting("printing of tensors", _print_options, _write_print_options),
        Setting("numpy's errors", *_of_numpy("geterr", lambda np, value: np.seterr(**value))),
        Setting(
            "printing of arrays",
            *_of_numpy("get_printoptions", lambda np, value: np.set_printoptions(**value)),
        ),
    ]


def generators() -> list[Setting]:
    """The process's own random generators, those of accelerators in use with them."""
    import torch

    found = [
        Setting("Python's random numbers", random.getstate, random.setstate),
        Setting("torch's random numbers", *_tensors(torch.get_rng_state, torch.set_rng_state)),
    ]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found.append(
            Setting(
                "numpy's random numbers",
                lambda: _hashable(numpy.random.get_state()),
                lambda value: numpy.random.set_state(_unhashable(value)),
            )
        )
    for name in ("cuda", "xpu", "mps"):
        device: Any = getattr(torch, name, None)
        if device is None or not device.is_available():
            continue
        if hasattr(device, "get_rng_state_all"):
            if device.is_initialized():
                ways = _tensors(device.get_rng_state_all, device.set_rng_state_all)
                found.append(Setting(f"{name}'s random numbers", *ways))
        else:
            ways = _tensors(device.get_rng_state, device.set_rng_state)
            found.append(Setting(f"{name}'s random numbers", *ways))
    return found


class _States(list[Any]):
    """States of torch's generators, comparable."""

    def __eq__(self, other: object) -> bool:
        import torch

        return isinstance(other, _States) and all(map(torch.equal, self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other


def _tensors(read: Callable[[], Any], write: Callable[[Any], object]) -> tuple[Any, Any]:
    def states() -> _States:
        found = read()
        return _States(found if isinstance(found, list | tuple) else [found])

    def put(value: _States) -> None:
        write(list(value) if isinstance(read(), list | tuple) else value[0])

    return states, put


def _hashable(state: Any) -> tuple[Any, ...]:
    return state[0], state[1].tobytes(), *state[2:]


def _unhashable(value: tuple[Any, ...]) -> tuple[Any, ...]:
    import numpy as np

    return value[0], np.frombuffer(value[1], np.uint32), *value[2:]


def _attribute(module: str, name: str) -> tuple[Any, Any]:
    import importlib

    owner = importlib.import_module(module)
    return (lambda: getattr(owner, name)), (lambda value: setattr(owner, name, value))


def _flushes_denormals() -> bool:
    """It can't be asked, but it shows."""
    import torch

    return bool((torch.full((1,), 1e-310, dtype=torch.float64) * 1.0).item() == 0.0)


def _default_device() -> Any:
    """None where nothing was set: then torch's functions are not wrapped."""
    import torch

    mode = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if mode is None else mode.device


def _write_environment(value: dict[str, str]) -> None:
    for name in os.environ.keys() - value.keys():
        del os.environ[name]
    for name, one in value.items():
        if os.environ.get(name) != one:
            os.environ[name] = one


def _fill(found: list[Any], value: list[Any]) -> None:
    found[:] = value


def _write_gc(value: tuple[tuple[int, int, int], bool]) -> None:
    gc.set_threshold(*value[0])
    (gc.enable if value[1] else gc.disable)()


def _write_filters(value: list[Any]) -> None:
    filters: Any = warnings.filters
    filters[:] = value
    getattr(warnings, "_filters_mutated", getattr(warnings, "_filters_mutated_lock_held", int))()


def _levels() -> dict[str, tuple[int, bool]]:
    loggers = {"": logging.root, **logging.root.manager.loggerDict}
    return {
        name: (one.level, bool(one.disabled))
        for name, one in loggers.items()
        if isinstance(one, logging.Logger)
    }


def _write_levels(value: dict[str, tuple[int, bool]]) -> None:
    for name, (level, disabled) in value.items():
        logger = logging.getLogger(name) if name else logging.root
        if logger.level != level:
            logger.setLevel(level)
        logger.disabled = disabled


def _print_options() -> dict[str, Any]:
    from torch import _tensor_str

    return dict(vars(_tensor_str.PRINT_OPTS))


def _write_print_options(value: dict[str, Any]) -> None:
    from torch import _tensor_str

    vars(_tensor_str.PRINT_OPTS).update(value)


def _of_numpy(read: str, write: Callable[[Any, Any], object]) -> tuple[Any, Any]:
    import numpy as np

    return getattr(np, read), (lambda value: write(np, value))
