"""Record what max-autotune measures, replay it, and predict it: what users call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from speedkit_jupyter.extras.autotune.problems import device_of, versions
from speedkit_jupyter.extras.autotune.tuner import (
    Counted,
    Model,
    Tuner,
    TunerOptions,
    stored,
    trained,
)
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.at_unload import at_unload
from speedkit_jupyter.support.exceptions import ArgumentError, SpeedKitError, did_you_mean
from speedkit_jupyter.support.tracebacks import hide_internal_frames

# In force, one at most: Inductor's hooks are the process's, and so is this.
_TUNERS: list[Tuner] = []
_CHOSEN: list[str] = []


def models() -> list[Model]:
    """Return the recorded models, a row for each device and version of torch and Triton."""
    return stored()


def detected(device: Any = None) -> str:
    """Return the name of this device's own model, as `NVIDIA-H200-matmul`.

    `device` is a torch.device or its name; by default the first GPU, or else the CPU.
    """
    return device_of(None if device is None else torch.device(device)).model


@hide_internal_frames
def use(name: str | None) -> str | None:
    """Predict by the model of another device from now on; None: by this device's own again.

    The beginning of a name is enough: `use("NVIDIA-A100-matmul")`. Returns the whole name; raises
    ArgumentError where no model, or more than one, has it.
    """
    if name is None:
        _CHOSEN.clear()
        return None
    if not isinstance(name, str):
        raise ArgumentError(f"name must be that of a model, not {arguments.shown(name)}")
    known = sorted({model.name for model in stored()})
    short = name.removesuffix("-matmul")
    found = [one for one in known if one == name] or [one for one in known if one.startswith(short)]
    if len(found) != 1:
        have = f"recorded are: {', '.join(known)}" if known else "none is recorded yet"
        what = "is the beginning of several models" if found else "is no recorded model"
        raise ArgumentError(f"{name!r} {what}; {have}.{did_you_mean(name, known)}")
    _CHOSEN[:] = found
    return found[0]


@hide_internal_frames
def train(name: str | None = None) -> Model:
    """Learn a ranking from what is recorded of a device, by default this one, and return the model
    with how well it did on shapes that were held back. Raises SpeedKitError for too few.
    """
    asked = name or device_of().model
    found = stored(asked)
    own = [one for one in found if one.versions == versions()] or found
    if not own:
        raise SpeedKitError(
            f"nothing is recorded for {asked}: `%speedkit autotune record`, then compile with "
            "mode='max-autotune'"
        )
    return trained(own[-1])


@hide_internal_frames
def record(remember: bool = True) -> Counted:
    """Record each search from now on until `off()`, and leave out what was recorded before."""
    return start(TunerOptions(remember=arguments.flag("remember", remember))).counted


@contextmanager
def predictions(
    confidence: float = 0.95, fallback: bool = True, remember: bool = True
) -> Iterator[Counted]:
    """In the block, time only the kernels that are likely the fastest; gives what is counted.

    A recorded product is replayed. Below `confidence` all kernels are timed, unless `fallback` is
    False. `remember` keeps what is measured.
    """
    options, before = predicting(confidence, fallback, remember), current()
    tuner = start(options)
    try:
        yield tuner.counted
    finally:
        if current() is tuner:  # else the block has put another in force, or none
            off()
            if before is not None:
                before.begin()
                _TUNERS.append(before)


def predicting(
    confidence: float = 0.95, fallback: bool = True, remember: bool = True
) -> TunerOptions:
    """Return these options, checked."""
    level = arguments.amount("confidence", confidence)
    if level is None or level > 1:
        raise ArgumentError(f"confidence must be from 0 to 1, not {arguments.shown(confidence)}")
    flags = arguments.flag("fallback", fallback), arguments.flag("remember", remember)
    return TunerOptions(True, level, *flags, model=chosen())


def start(options: TunerOptions) -> Tuner:
    """Put a tuner in force, in the place of the one that is."""
    tuner = Tuner(options)
    off()
    tuner.begin()
    _TUNERS.append(tuner)
    at_unload(off)
    return tuner


def off() -> None:
    """Let Inductor search as usual."""
    while _TUNERS:
        _TUNERS.pop().end()


def current() -> Tuner | None:
    """Return what is in force."""
    return _TUNERS[-1] if _TUNERS else None


def chosen() -> str | None:
    """Return the name that `use` was given last."""
    return _CHOSEN[0] if _CHOSEN else None
