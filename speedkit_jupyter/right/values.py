"""The comparable parts of a nested result: numbers, and parts that must be equal."""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from speedkit_jupyter.torchglue.storage import plain

# Larger tensors are compared by an evenly spaced sample, which is fast to copy.
MOST_ELEMENTS = 2**20
SEQUENCES, SETS = (list, tuple, deque), (set, frozenset)


def leaves(value: Any, name: str = "") -> dict[str, torch.Tensor | str]:
    """Return the comparable parts of a value, by location; `name` is the value's name.

    Numbers are detached floating-point tensors, complex numbers are pairs, integers are int64
    tensors in main memory, and everything else is text.
    """
    found: dict[str, torch.Tensor | str] = {}
    _search(found, value, name, depth=8)  # deeper nesting is not searched
    return found


def _search(found: dict[str, Any], value: Any, name: str, depth: int) -> None:
    value, before = without_numpy(value), len(found)
    if isinstance(value, (numbers.Number, str, bytes, enum.Enum, torch.Tensor)):
        while name in found:
            name += "'"
        found[name] = _comparable(value)
    elif value is not None and depth:
        for inner, part in _inside(value):
            _search(found, part, ".".join(filter(None, (name, inner))), depth - 1)
        if len(found) == before and not isinstance(value, (*SEQUENCES, *SETS, Mapping)):
            found[name] = type(value).__name__


def _comparable(value: Any) -> torch.Tensor | str:
    if isinstance(value, numbers.Integral):  # includes bool
        value = torch.tensor(int(value) % 2**63)
    elif isinstance(value, numbers.Number):
        with suppress(TypeError):  # a library's own number type
            pair = complex(value)  # type: ignore[call-overload]
            value = torch.tensor([pair.real, pair.imag], dtype=torch.float64)
    if not isinstance(value, torch.Tensor):
        return str(value)
    values = plain(value)
    if values is None:
        return f"{type(value).__name__} without values"
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.is_floating_point() and values.element_size() == 1:  # float8 has few operations
        values = values.float()
    if values.numel() > MOST_ELEMENTS:
        values = values.flatten()[:: values.numel() // MOST_ELEMENTS | 1]
    return values if values.is_floating_point() else values.to("cpu", torch.int64)


def _inside(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, SETS):  # only the size, because rounding may change the order
        are_real = all(isinstance(item, numbers.Real) for item in value)
        return [("", item) for item in sorted(value, key=float if are_real else repr)]
    if isinstance(value, SEQUENCES):
        names = getattr(value, "_fields", map(str, range(len(value))))
        return zip(names if len(value) > 1 else [""], value, strict=False)
    if callable(value) or isinstance(value, (torch.optim.Optimizer, torch.Generator)):
        return []
    if dataclasses.is_dataclass(value):
        return [(one.name, getattr(value, one.name, None)) for one in dataclasses.fields(value)]
    return list(getattr(value, "__dict__", {}).items())


def without_numpy(value: Any) -> Any:
    """Return a NumPy array or scalar as a tensor or text; other values unchanged."""
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "fciub":
        return repr(array.tolist())
    dtype = "int64" if array.dtype.kind in "iub" else array.dtype.newbyteorder("=")
    return torch.from_numpy(np.array(array, dtype=dtype))
