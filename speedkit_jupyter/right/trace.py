"""Compare the values that runs of a step compute with the values of a recorded run, the trace."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import torch

from speedkit_jupyter.right import deviations
from speedkit_jupyter.right.deviations import Deviation, Sums
from speedkit_jupyter.torchglue.storage import plain

# Kinds of changed state: parameters that optimizers stepped, other parameters, and buffers.
MOVES = ("parameter", "moved", "buffer")
# A moment of a step: call, optimizer steps so far, kind of comparison, tag, running number.
Key = tuple[int, int, str, str, int]
Values = dict[str, Any]
# Inputs and outputs with 2 × MOST_ELEMENTS or more are compared by an evenly spaced sample.
MOST_ELEMENTS = 2**20
SEQUENCES, SETS = (list, tuple, deque), (set, frozenset)


@dataclass
class Look:
    """The values at one moment; `ways` has the norm of each state tensor's change so far."""

    values: Values
    ways: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ObservedDifference:
    """The difference between a run's value and the trace's value.

    `fits` is False for a missing tensor or another shape. Floats have an `error`. Of integers,
    `count` differ, by at most `most`; `largest` is the trace's largest magnitude, and `first` the
    first differing index in the last dimension. Text has size 0, and `count` 1 if it differs.
    Floats of kind `result` (after differing tokens or uncompared optimizer steps) are not judged.
    """

    kind: str
    size: int = 0
    fits: bool = True
    dtype: str = ""
    sums: Sums = field(default_factory=lambda: Sums(0))
    error: Deviation | None = None
    count: int = 0
    most: float = 0.0
    largest: float = 0.0
    first: int = 0
    is_finite: bool = True


@dataclass
class ObservedRun:
    """The differences between a run, which is a few calls of the step, and the trace.

    `steps` counts optimizer steps; `ends` has the count at the end of each call. `diverged` is True
    if a model got other integers than in the trace, such as other generated tokens.
    """

    rows: dict[tuple[Key, str], ObservedDifference] = field(default_factory=dict)
    steps: int = 0
    ends: list[int] = field(default_factory=list)
    diverged: bool = False

    @cached_property
    def latest(self) -> dict[tuple[str, str], ObservedDifference]:
        """Return the last fitting row of each kind and name; cached, so read it after the run."""
        return {(row.kind, name): row for (_, name), row in self.rows.items() if row.fits}


def compared(kind: str, found: Values, look: Look | None) -> dict[str, ObservedDifference]:
    """Return the differences of `found` from the trace (`look`), by name.

    With several gradients, the row "" compares all together. Without `look`, only text fits.
    """
    expected = found if look is None else look.values
    rows, pairs = dict[str, ObservedDifference](), dict[str, Any]()
    for name in {**expected, **found}:
        mine, theirs = found.get(name), expected.get(name)
        is_known = look is not None and name in found and name in expected
        rows[name] = _form(kind, mine, theirs, is_known)
        if rows[name].fits and _are_floating(mine, theirs):
            pairs[name] = mine, theirs
    parts = dict(zip(pairs, deviations.sums(list(pairs.values())), strict=True))
    for name, way in (look.ways if look is not None else {}).items():
        if name in parts:
            parts[name] = parts[name].along(way, pairs[name][0].dtype)
    every = list(parts.values())
    # A value that hardly changes, such as a mean of zeros, is compared relative to other values.
    together = kind == "gradient" or kind in MOVES
    errors = deviations.of_gradients(parts) if together else [part.deviation() for part in every]
    for (name, (mine, theirs)), part, error in zip(pairs.items(), every, errors, strict=True):
        is_own = mine is theirs and mine is not None and mine.numel()  # just added to the trace
        # Masks hold infinities: one finite element is enough. A finite sum proves it cheaply.
        of_own = (bool(check.isfinite().any()) for check in (mine.sum(), mine)) if is_own else ()
        is_finite = any(of_own) if is_own else math.isfinite(part.off)
        rows[name] = replace(rows[name], sums=part, error=error, is_finite=is_finite)
    if kind == "gradient" and len(parts) > 1:
        whole = deviations.total(every)
        error = whole.deviation(deviations.LEAST_GRADIENT)
        rows[""] = ObservedDifference("gradients", whole.size, error=error)
    return rows


def _form(kind: str, mine: Any, theirs: Any, is_known: bool) -> ObservedDifference:
    """Compare shapes, text and integers; `compared` adds the comparison of floats."""
    if isinstance(mine, str) or isinstance(theirs, str):  # missing text counts as another text
        return ObservedDifference(kind, count=int(mine != theirs))
    tensors = [one for one in (mine, theirs) if one is not None]
    size = max((tensor.numel() for tensor in tensors), default=1)
    fits = is_known and len({tensor.shape for tensor in tensors}) < 2
    row = ObservedDifference(kind, size, fits, str(getattr(mine, "dtype", "")))
    if not (fits and size and any(map(is_exact, tensors))):
        return row
    off = (mine.to(theirs.device).double() - theirs.double()).abs()
    largest = float(theirs.double().abs().max())
    count, most = int((off > 0).sum()), float(off.max())
    first = int((off.reshape(-1, *off.shape[-1:]) > 0).any(0).int().argmax())
    return replace(row, count=count, most=most, largest=largest, first=first)


def _are_floating(*values: Any) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and not any(isinstance(one, str) or is_exact(one) for one in known)


def is_exact(value: Any) -> bool:
    is_tensor = value is not None and not isinstance(value, str)
    return is_tensor and not (value.is_floating_point() or value.is_complex())


# --- the comparable parts of a nested result ---


def leaves(value: Any, name: str = "") -> dict[str, torch.Tensor | str]:
    """Return the comparable parts of a nested value, by location; `name` is the value's name.

    Tensors are detached, and large tensors sampled. Python's floats and complex numbers become
    pairs (real, imaginary). Integers become int64 tensors on the CPU. Other parts become text.
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
        value = torch.tensor((int(value) + 2**63) % 2**64 - 2**63)  # wraps to int64
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
    if isinstance(value, SETS):  # sorted, because sets have no order
        are_real = all(isinstance(item, numbers.Real) for item in value)
        return [("", item) for item in sorted(value, key=float if are_real else repr)]
    if isinstance(value, SEQUENCES):
        names = getattr(value, "_fields", map(str, range(len(value))))
        return zip(names if len(value) > 1 else [""], value, strict=False)
    if callable(value) or isinstance(value, (torch.optim.Optimizer, torch.Generator, ModuleType)):
        return []
    if str(type(value).__module__).startswith("matplotlib."):  # a figure has thousands of numbers
        return []
    if dataclasses.is_dataclass(value):
        return [(one.name, getattr(value, one.name, None)) for one in dataclasses.fields(value)]
    return list(getattr(value, "__dict__", {}).items())


def without_numpy(value: Any) -> Any:
    """Return a NumPy array or scalar as a tensor or text; return other values unchanged."""
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "fciub":
        return repr(array.tolist())
    dtype = "int64" if array.dtype.kind in "iub" else array.dtype.newbyteorder("=")
    if array.dtype in (np.longdouble, np.clongdouble):  # torch has no such dtype
        dtype = "float64" if array.dtype.kind == "f" else "complex128"
    return torch.from_numpy(np.array(array, dtype=dtype))
