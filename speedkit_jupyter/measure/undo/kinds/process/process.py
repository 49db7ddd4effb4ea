"""What belongs to the whole process: switches, surroundings, its own random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

from speedkit_jupyter.machines import devices
from speedkit_jupyter.measure.undo.kinds.process import (
    interpreter,
    loaded_libraries,
    loggers,
    operating_system,
    torch_registries,
    torch_switches,
)
from speedkit_jupyter.measure.undo.kinds.settings import Setting


def switches() -> list[Setting]:
    """What changes how a step computes: put back between rounds, too."""
    return [*torch_switches.computing()]


def surroundings() -> list[Setting]:
    """What a step may set beside: put back once, at the end."""
    return [
        *operating_system.settings(),
        *interpreter.settings(),
        *loggers.settings(),
        *loaded_libraries.settings(),
        *torch_registries.settings(),
    ]


def generators() -> list[Setting]:
    """The process's own random generators, those of accelerators in use with them."""
    import torch

    settings = [
        Setting("Python's random numbers", random.getstate, random.setstate),
        Setting("torch's random numbers", *_tensors(torch.get_rng_state, torch.set_rng_state)),
    ]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        settings.append(
            Setting(
                "numpy's random numbers",
                lambda: _hashable(numpy.random.get_state()),
                lambda value: numpy.random.set_state(_unhashable(value)),
            )
        )
    for kind in devices.in_use():
        settings.append(Setting(f"{kind.name}'s random numbers", *_tensors(*kind.generators())))
    return settings


class _States(list[Any]):
    """States of torch's generators, comparable."""

    def __eq__(self, other: object) -> bool:
        import torch

        return isinstance(other, _States) and all(map(torch.equal, self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other


def _tensors(read: Callable[[], Any], write: Callable[[Any], object]) -> tuple[Any, Any]:
    def states() -> _States:
        state = read()
        return _States(state if isinstance(state, list | tuple) else [state])

    def put(value: _States) -> None:
        write(list(value) if isinstance(read(), list | tuple) else value[0])

    return states, put


def _hashable(state: Any) -> tuple[Any, ...]:
    return state[0], state[1].tobytes(), *state[2:]


def _unhashable(value: tuple[Any, ...]) -> tuple[Any, ...]:
    import numpy as np

    return value[0], np.frombuffer(value[1], np.uint32), *value[2:]
