"""The trace of a run: the values at each moment of a step, and the differences of other runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from speedkit_jupyter.right import deviations
from speedkit_jupyter.right.deviations import Deviation, Sums

# Kinds of comparisons of changed state: parameters by optimizers or otherwise, and buffers.
MOVES = ("parameter", "moved", "buffer")
# A moment of a step: call, optimizer steps so far, kind of comparison, tag, number.
Key = tuple[int, int, str, str, int]
Values = dict[str, Any]


@dataclass
class Look:
    """The values at one moment; `ways` are the changes of parameters and buffers up to it."""

    values: Values
    ways: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ObservedDifference:
    """The difference of a value from the trace; `fits` is False for missing values or wrong shapes.

    `error` belongs to floating-point numbers. `count` integers differ, by `most` at most, where the
    trace's largest is `largest`; the `first` is at this index of the last dimension. Text has no
    size. Of a kind `result`, after more optimizer steps than are followed or from other tokens,
    only the form is compared.
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
    """The differences of a few calls of the step.

    `steps` counts optimizer steps; `ends` has the count at the end of each call. A run has
    `diverged` if a model got other integers than in the trace, because a step feeds back tokens.
    """

    rows: dict[tuple[Key, str], ObservedDifference] = field(default_factory=dict)
    steps: int = 0
    ends: list[int] = field(default_factory=list)
    diverged: bool = False

    @cached_property
    def latest(self) -> dict[tuple[str, str], ObservedDifference]:
        """Return the last row of each kind and name; cached, so read it after the run."""
        return {(row.kind, name): row for (_, name), row in self.rows.items() if row.fits}


def compared(kind: str, found: Values, look: Look | None) -> dict[str, ObservedDifference]:
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
    # A value that hardly changes, such as the mean of zeros, is compared with the others' changes.
    together = kind == "gradient" or kind in MOVES
    errors = deviations.of_gradients(parts) if together else [part.deviation() for part in every]
    for (name, (mine, theirs)), part, error in zip(pairs.items(), every, errors, strict=True):
        is_own = mine is theirs and mine is not None and mine.numel()  # others may be masks
        # A sum is far cheaper than a test of each element.
        of_own = (bool(check.isfinite().any()) for check in (mine.sum(), mine)) if is_own else ()
        is_finite = any(of_own) if is_own else math.isfinite(part.off)
        rows[name] = replace(rows[name], sums=part, error=error, is_finite=is_finite)
    if kind == "gradient" and len(parts) > 1:
        whole = deviations.total(every)
        error = whole.deviation(deviations.LEAST_GRADIENT)
        rows[""] = ObservedDifference("gradients", whole.size, error=error)
    return rows


def _form(kind: str, mine: Any, theirs: Any, is_known: bool) -> ObservedDifference:
    """Compare shapes, text and integers; floating-point tensors are reduced together later."""
    if isinstance(mine, str) or isinstance(theirs, str):  # their number may be random
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
