"""A model that a file of the user's makes, for the command line: `train.py:make_model`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support.exceptions import SpeedKitError, did_you_mean

if TYPE_CHECKING:
    import torch


def given(text: str) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    """The model that a function makes, and the optimizers that it makes along with it.

    Raises SpeedKitError, in a line, for whatever goes wrong in there.
    """
    import torch

    file, _, name = text.rpartition(":")
    if not (file and name.isidentifier()):
        raise SpeedKitError(f"--model {text}: write FILE:NAME, as in train.py:make_model")
    made = _called(_module(Path(file), text), name, text)
    model, *parts = made if isinstance(made, tuple | list) else (made,)
    optimizers = [o for part in parts for o in (part if isinstance(part, Sequence) else [part])]
    if not isinstance(model, torch.nn.Module):
        kind = type(model).__name__
        raise SpeedKitError(f"--model {text}: it makes a {kind}, not a torch.nn.Module")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise SpeedKitError(f"--model {text}: beside the model it makes a {kind}, no optimizer")
    return model, optimizers


def _module(file: Path, text: str) -> Any:
    """The file, imported under its own name with its folder on the path, as Python runs it."""
    if not file.is_file():
        siblings = [sibling.name for sibling in file.parent.glob("*.py")]
        raise SpeedKitError(
            f"--model {text}: there is no file {file}.{did_you_mean(file.name, siblings)}"
        )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise SpeedKitError(f"--model {text}: {file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    sys.path.insert(0, str(file.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise SpeedKitError(f"--model {text}: {file} raises {_line(error)}") from None
    finally:
        sys.path.pop(0)
    return module


def _called(module: Any, name: str, text: str) -> Any:
    make = getattr(module, name, None)
    if not callable(make):
        functions = [attribute for attribute, value in vars(module).items() if callable(value)]
        hint = did_you_mean(name, functions)
        raise SpeedKitError(f"--model {text}: there is no function {name!r} in there.{hint}")
    try:
        return make()
    except (Exception, SystemExit) as error:
        raise SpeedKitError(f"--model {text}: {name}() raises {_line(error)}") from None


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
