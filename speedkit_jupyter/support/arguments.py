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

_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxlevel = 60, 2


def seconds(name: str, value: Any) -> float | None:
    """Return a positive number of seconds, or None; raises StepError."""
    number = amount(f"{name}: the budget", value, "a positive number of seconds")
    if number == 0:
        raise StepError(f"{name}: the budget must be a positive number of seconds, not 0")
    return number


def amount(name: str, value: Any, wanted: str = "a number from 0 on") -> float | None:
    """Return a finite number that is not below 0, or None; raises StepError."""
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise StepError(f"{name} must be {wanted}, not {shown(value)}")
    return number


def whole(name: str, value: Any) -> int:
    """Return a whole number of a size that can be counted to; raises StepError."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > sys.maxsize:
        raise StepError(f"{name} must be a whole number, not {shown(value)}")
    return value


def flag(name: str, value: Any) -> bool:
    """Return True or False; raises StepError."""
    if not isinstance(value, bool):
        raise StepError(f"{name} must be True or False, not {shown(value)}")
    return value


def names(name: str, value: Any) -> list[str]:
    """Return names in a text with commas between, or one after another; raises StepError."""
    listed = value.split(",") if isinstance(value, str) else value
    must_be = f"{name} must be names, as in 'baseline,bf16'"
    if not isinstance(listed, list | tuple) or not listed:
        raise StepError(f"{must_be}, not {shown(value)}")
    for item in listed:
        if not isinstance(item, str):
            raise StepError(f"{must_be}: {shown(item)} is none")
    if not all(item.strip() for item in listed):
        raise StepError(f"{must_be}: one is empty in {shown(value)}")
    return [item.strip() for item in listed]


def name(label: str, value: Any) -> str:
    """Return a plan's name; raises StepError."""
    if not isinstance(value, str):
        raise StepError(f"{label} must be a variant's name or a SpeedConfig, not {shown(value)}")
    return value


def word(name: str, value: Any) -> str:
    """Return what names an object: `net`, `trainer.model`, `models["lm"]`, `layers[0]`.

    Raises ArgumentError.
    """
    try:
        return lookup.canonical(value if isinstance(value, str) else "")
    except SpeedKitError:
        raise ArgumentError(
            f"{name} must be your word for an object, as net, trainer.model, models['lm'] or "
            f"layers[0], not {shown(value)}"
        ) from None


def modules(name: str, value: Any) -> list[Any]:
    """Return a model or several as a list; raises StepError."""
    import torch

    listed = list(value) if isinstance(value, list | tuple) else [value]
    for model in listed:
        if not isinstance(model, torch.nn.Module):
            must_be = "must be a torch.nn.Module, or a list of them"
            raise StepError(f"{name} {must_be}, not {shown(model)}")
    return listed


def optimizers(name: str, value: Any) -> list[Any]:
    """Return an optimizer or several as a list; raises TypeError."""
    listed = list(value) if isinstance(value, list | tuple) else [value]
    for optimizer in listed:
        if not is_optimizer(optimizer):
            must_be = "must be a torch.optim.Optimizer"
            raise ArgumentError(f"{name} {must_be}, not {type(optimizer).__name__}")
    return listed


def of_kind(name: str, value: Any, kind: type, optional: bool = True) -> None:
    """Raise TypeError for what is of another class; None is taken where it is optional."""
    if not (isinstance(value, kind) or (optional and value is None)):
        raise ArgumentError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")


def path(name: str, value: Any) -> str | os.PathLike[str]:
    """Return a path; raises ConfigError."""
    if isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str):
        return value
    raise ConfigError([f"{name} must be a path, not {shown(value)}"])


def shown(value: Any) -> str:
    """Return a value in a few words and in one line."""
    if isinstance(value, bool | int | float | str | bytes | list | tuple | dict) or value is None:
        try:
            return " ".join(_SHORT.repr(value).split())
        except ValueError:  # Python writes no number of more than some thousand digits
            return "so large a number"
    return f"the type {value.__name__}" if isinstance(value, type) else type(value).__name__
