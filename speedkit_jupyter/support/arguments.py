"""What the public functions ask of their arguments, and one line for what they can't take."""

from __future__ import annotations

import math
import os
import reprlib
import sys
from typing import Any

from speedkit_jupyter.support import lookup
from speedkit_jupyter.support.exceptions import (
    ArgumentError,
    ConfigError,
    SpeedKitError,
    StepError,
)
from speedkit_jupyter.support.wrappers import is_optimizer


def seconds(name: str, value: Any) -> float | None:
    """A positive number of seconds, or None; raises StepError."""
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number > 0 or math.isinf(number):
        raise StepError(
            f"{name}: the budget must be a positive number of seconds, not {_of(value)}"
        )
    return number


def amount(name: str, value: Any) -> float | None:
    """A finite number that is not below 0, or None; raises StepError."""
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise StepError(f"{name} must be a number from 0 on, not {_of(value)}")
    return number


def whole(name: str, value: Any) -> int:
    """A whole number of a size that can be counted to; raises StepError."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > sys.maxsize:
        raise StepError(f"{name} must be a whole number, not {_of(value)}")
    return value


def flag(name: str, value: Any) -> bool:
    """True or False; raises StepError."""
    if not isinstance(value, bool):
        raise StepError(f"{name} must be True or False, not {_of(value)}")
    return value


def names(name: str, value: Any) -> list[str]:
    """Names in a text with commas between, or one after another; raises StepError."""
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not listed:
        raise StepError(f"{name} must be names, as in 'baseline,bf16', not {_of(value)}")
    for item in listed:
        if not isinstance(item, str):
            raise StepError(f"{name} must be names, as in 'baseline,bf16': {_of(item)} is none")
    if not all(item.strip() for item in listed):
        raise StepError(
            f"{name} must be names, as in 'baseline,bf16': one is empty in {_of(value)}"
        )
    return [item.strip() for item in listed]


def name(label: str, value: Any) -> str:
    """A plan's name; raises StepError."""
    if not isinstance(value, str):
        raise StepError(f"{label} must be a variant's name or a SpeedConfig, not {_of(value)}")
    return value


def word(name: str, value: Any) -> str:
    """What names an object: `net`, `trainer.model`, `models["lm"]`, `layers[0]`.

    Raises ArgumentError.
    """
    try:
        return lookup.canonical(value if isinstance(value, str) else "")
    except SpeedKitError:
        raise ArgumentError(
            f"{name} must be your word for an object, as net, trainer.model, models['lm'] or "
            f"layers[0], not {_of(value)}"
        ) from None


def modules(name: str, value: Any) -> list[Any]:
    """A model or several; raises StepError."""
    import torch

    listed = list(value) if isinstance(value, list | tuple) else [value]
    for model in listed:
        if not isinstance(model, torch.nn.Module):
            raise StepError(
                f"{name} must be a torch.nn.Module, or a list of them, not {_of(model)}"
            )
    return listed


def optimizers(name: str, value: Any) -> list[Any]:
    """An optimizer or several; raises TypeError."""
    listed = list(value) if isinstance(value, list | tuple) else [value]
    for optimizer in listed:
        if not is_optimizer(optimizer):
            raise ArgumentError(
                f"{name} must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
            )
    return listed


def of_kind(name: str, value: Any, kind: type, optional: bool = True) -> None:
    """Raises TypeError for what is no such thing, nor None where it is optional."""
    if not (isinstance(value, kind) or (optional and value is None)):
        raise ArgumentError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")


def path(name: str, value: Any) -> str | os.PathLike[str]:
    """A path; raises ConfigError."""
    if isinstance(value, str) or (
        isinstance(value, os.PathLike) and isinstance(os.fspath(value), str)
    ):
        return value
    raise ConfigError([f"{name} must be a path, not {_of(value)}"])


def _of(value: Any) -> str:
    """A value in a few words and in one line."""
    if isinstance(value, bool | int | float | str | bytes | list | tuple | dict) or value is None:
        try:
            return " ".join(reprlib.repr(value).split())
        except ValueError:  # too many digits
            return "so large a number"
    return type(value).__name__ if not isinstance(value, type) else f"the type {value.__name__}"
