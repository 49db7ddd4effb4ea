"""A model that a file of the user's makes, for the command line: `train.py:make_model`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support.exceptions import SpeedKitError, did_you_mean

if TYPE_CHECKING:
    import torch


def given(text: str) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    """Return the model that a function makes, and the optimizers that it makes along with it.

    Raises SpeedKitError, in a line, for whatever goes wrong in there.
    """
    import torch

    path, _, name = text.rpartition(":")
    if not (path and name.isidentifier()):
        raise SpeedKitError(f"--model {text}: write FILE:NAME, as in train.py:make_model")
    made = _made(Path(path), name, text)
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


def _made(file: Path, name: str, text: str) -> Any:
    """Return what the function makes; its folder is on the path, as where Python runs the file."""
    if not file.is_file():
        hint = did_you_mean(file.name, [sibling.name for sibling in file.parent.glob("*.py")])
        raise SpeedKitError(f"--model {text}: there is no file {file}.{hint}")
    where = str(file)
    sys.path.insert(0, str(file.parent.resolve()))
    try:
        names = runpy.run_path(str(file), run_name=file.stem)
        make, where = names.get(name), f"{name}()"
        if callable(make):
            return make()
    except (Exception, SystemExit) as error:
        line = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise SpeedKitError(f"--model {text}: {where} raises {line}") from None
    finally:
        sys.path.pop(0)
    hint = did_you_mean(name, [word for word, value in names.items() if callable(value)])
    raise SpeedKitError(f"--model {text}: there is no function {name!r} in there.{hint}")
