"""Functions and modules by file and name: `candidate.py:f`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from speedkit_jupyter.support.exceptions import ArgumentError, did_you_mean


def is_word(value: Any) -> bool:
    """Return whether it names an object of a file."""
    return isinstance(value, str) and ".py:" in value


def located(word: str) -> tuple[Path, str]:
    """Return the file and the name in it. Raises ArgumentError where there is no such file."""
    path, _, name = word.rpartition(":")
    file = Path(path).expanduser().resolve()
    if not path.endswith(".py") or not name.isidentifier():
        raise ArgumentError(f"{word!r} must name a function of a file, as in kernels.py:softmax")
    if not file.is_file():
        raise ArgumentError(f"there is no file {path}")
    return file, name


def loaded(word: str, seed: int = 0) -> Any:
    """Return what `file.py:name` names; of a class of modules one that is made from this seed.

    Raises ArgumentError where there is no such file or name; what the file raises goes on.
    """
    import torch

    file, name = located(word)
    key = f"_checked_{file.stem}_{abs(hash(file))}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[key] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[key]
            raise
    names = vars(sys.modules[key])
    if name not in names:
        raise ArgumentError(f"{file.name} has no {name}.{did_you_mean(name, names)}")
    found = names[name]
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        torch.manual_seed(seed)
        found = found()
    return found
