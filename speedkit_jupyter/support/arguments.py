"""Check the arguments of public functions, and read files given as arguments."""

from __future__ import annotations

import os
import reprlib
import stat
import sys
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from speedkit_jupyter.support import lookup
from speedkit_jupyter.support.exceptions import (
    ArgumentError,
    ConfigError,
    SpeedKitError,
    StepError,
    printable,
)
from speedkit_jupyter.support.wrappers import is_optimizer, models_in

T = TypeVar("T")
_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxlevel = 60, 2
# Limit for configs and machine profiles, which have at most a few KiB; larger files are refused.
MOST_FILE_BYTES = 2**16
FINITE = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AMOUNT = TypeAdapter[float | None](FINITE | None)
SECONDS = TypeAdapter[float | None](Annotated[FINITE, Field(gt=0)] | None)
WHOLE = TypeAdapter[int](Annotated[int, Field(ge=-sys.maxsize, le=sys.maxsize)])
NAME = Annotated[str, Field(pattern=r"\S")]
NAMES = TypeAdapter[Any](Annotated[list[NAME] | tuple[NAME, ...], Field(min_length=1)])


def _checked(name: str, value: Any, kind: TypeAdapter[T], must_be: str) -> T:
    try:
        return kind.validate_python(value, strict=True)
    except ValidationError:
        raise StepError(f"{name} must be {must_be}, not {shown(value)}") from None


def seconds(name: str, value: Any) -> float | None:
    """Return `value` if it is None or a positive, finite number (seconds); else raise StepError."""
    return _checked(f"{name}: the budget", value, SECONDS, "a positive number of seconds")


def amount(name: str, value: Any) -> float | None:
    """Return `value` if it is None or a finite number of at least 0; else raise StepError."""
    return _checked(name, value, AMOUNT, "a number of at least 0")


def whole(name: str, value: Any) -> int:
    """Return `value` if it is an int from -sys.maxsize to sys.maxsize; else raise StepError."""
    return _checked(name, value, WHOLE, "a whole number")


def count(name: str, value: Any) -> int:
    """Return `value`, an int from 1 on. Raises ArgumentError below 1, StepError for other types."""
    if (number := whole(name, value)) < 1:
        raise ArgumentError(f"{name} must be 1 or more, not {number}")
    return number


def flag(name: str, value: Any) -> bool:
    """Return `value` if it is True or False; else raise StepError."""
    return _checked(name, value, TypeAdapter(bool), "True or False")


def name(label: str, value: Any) -> str:
    """Return a variant's name, which must be a string; else raise StepError."""
    return _checked(label, value, TypeAdapter(str), "a variant's name or a SpeedConfig")


def names(name: str, value: Any) -> list[str]:
    """Return the names in a list, tuple or comma-separated string, stripped. Raises StepError."""
    listed = value.split(",") if isinstance(value, str) else value
    return [one.strip() for one in _checked(name, listed, NAMES, "names, as in 'one,two'")]


def word(name: str, value: Any) -> str:
    """Return an expression in normal form: `model[0]` for `model.0`. Raises ArgumentError."""
    try:
        return lookup.canonical(value if isinstance(value, str) else f"<{shown(value)}>")
    except SpeedKitError as error:
        raise ArgumentError(f"{name}: {error}") from None


def modules(name: str, value: Any) -> list[Any]:
    """Return a list of the models in `value`. Raises StepError for an object without models."""
    import torch

    listed = list(value) if isinstance(value, list | tuple) else [value]
    found: list[Any] = []
    for one in listed:
        models = [one] if isinstance(one, torch.nn.Module) else [*models_in(one).values()]
        if not models:
            must_be = "must be a torch.nn.Module, or a list of them"
            raise StepError(f"{name} {must_be}, not {shown(one)}")
        found += models
    return found


def model(name: str, value: Any, optional: bool = False) -> None:
    """Raise ArgumentError unless `value` is a model, or None if `optional`."""
    import torch

    if isinstance(value, torch.nn.Module) or (optional and value is None):
        return
    held = ", ".join(models_in(value))
    hint = f". Give one of its models: {held}" if held else ""
    raise ArgumentError(f"{name} a torch.nn.Module, not {type(value).__name__}{hint}")


def optimizers(name: str, value: Any) -> list[Any]:
    """Return the given optimizer or optimizers as a list; other objects raise ArgumentError."""
    listed = list(value) if isinstance(value, list | tuple) else [value]
    for optimizer in listed:
        if not is_optimizer(optimizer):
            kind = type(optimizer).__name__
            raise ArgumentError(f"{name} must be a torch.optim.Optimizer, not {kind}")
    return listed


def of_kind(name: str, value: Any, kind: type, optional: bool = True) -> None:
    """Raise ArgumentError unless `value` is an instance of `kind`, or None if `optional`."""
    if not (isinstance(value, kind) or (optional and value is None)):
        raise ArgumentError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")


def path(name: str, value: Any) -> str | os.PathLike[str]:
    """Return `value` if it is a path as text or os.PathLike; else raise ConfigError."""
    if isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str):
        return value
    raise ConfigError([f"{name} must be a path, not {shown(value)}"])


def file_text(file: str | os.PathLike[str]) -> str:
    """Return the text of a UTF-8 file of at most MOST_FILE_BYTES. Raises OSError or ValueError."""
    if not stat.S_ISREG(Path(file).stat().st_mode):  # a pipe or a device may never end
        raise ValueError("not a regular file")
    with open(file, "rb") as opened:
        content = opened.read(MOST_FILE_BYTES + 1)
    if len(content) > MOST_FILE_BYTES:
        raise ValueError(f"it has more than {MOST_FILE_BYTES:,} bytes")
    return content.decode()


def why(error: BaseException) -> str:
    """Return the reason why a file or text can't be read, in one line."""
    if isinstance(error, RecursionError | MemoryError):
        return "it is too deeply nested or too large"
    said = str(getattr(error, "strerror", None) or error or type(error).__name__)
    return printable(" ".join(said.split()))[:160]


def shown(value: Any) -> str:
    """Return a short one-line text for a value in an error message."""
    if isinstance(value, bool | int | float | str | bytes | list | tuple | dict) or value is None:
        try:
            return " ".join(_SHORT.repr(value).split())
        except ValueError:  # Python refuses to format integers with thousands of digits
            return "such a large number"
    return f"the type {value.__name__}" if isinstance(value, type) else type(value).__name__
