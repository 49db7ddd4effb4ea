"""Whether values agree with the truth, which is the reference in float64: each tensor, and its
worst row, column and element.

`measure.checks` says what a dtype's rounding explains; here its limits of outputs hold for
gradients too, since a single function has fewer places where rounding is decisive than a net has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from speedkit_jupyter.extras.check.calls import BUFFER, GRADIENT, INPUT, Drawn, Here, Taken
from speedkit_jupyter.extras.check.parts import Values, laid_out
from speedkit_jupyter.right import rounding
from speedkit_jupyter.right.deviations import NOTHING, Deviation, sums, total
from speedkit_jupyter.right.reference import in_float64
from speedkit_jupyter.right.tolerance import TERMS, beyond_limit
from speedkit_jupyter.torchglue.private import tree_map

# The worst row, column and element may be so many times as far off as those of what rounding
# explains. A single element's error scatters more than that of a row.
WORST = {"a row": 4.0, "a column": 4.0, "an element": 8.0}
# A gradient is compared relative to this share of the root mean square of all at least: a smaller
# one may be what rounding left of a zero, as of the keys where there is only one.
SMALL = 1e-2
# A round is compared with the reference's own result, whose error adds to that of the candidate.
BOTH = 2.0


@dataclass
class TensorDifference:
    """How far one tensor is off its reference, all of it and its worst parts."""

    deviation: Deviation = field(default_factory=Deviation)
    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WORST, 0.0))
    differing: int = 0  # of integers
    size: int = 0


class RoundingLimits:
    """The truth of calls of one size, and what rounding explains: for each tensor the largest
    deviation of the reference, which is `side`, and of its controls. `usual` is the size of each
    tensor, so that one whose few values cancel in a call is compared with what they are else.
    """

    def __init__(self, side: Here, precision: str, usual: Mapping[str, float]) -> None:
        self.precision, self.usual, self._side = precision, usual, side
        self._wide = partial(in_float64, [side.function] if side.state else [])
        self.rows: dict[str, TensorDifference] = {}

    def truth(self, drawn: Drawn, own: Taken) -> Values:
        """Return what a call gives in float64, or its `own` values where that can't be run."""
        wide = _widened(drawn)
        found = self._run(wide, self._wide)
        truth = found if found is not None and _shapes(found) == _shapes(own) else own
        self.usual = usual(own.values, self.usual)
        self._add(rows(own.values, truth.values, self.usual))
        for to_nearest in (False, True):
            control = partial(rounding.rounded, self.precision, to_nearest)
            is_plain = self.precision == "fp32"
            run = self._run(drawn, control) if is_plain else self._run(wide, self._wide, control)
            if run is not None and _shapes(run) == _shapes(truth):
                self._add(rows(run.values, truth.values, self.usual))
        return truth.values

    def _run(
        self, drawn: Drawn, *around: Callable[[], AbstractContextManager[Any]]
    ) -> Taken | None:
        """Return what the reference gives; None where the surroundings don't allow it."""
        with suppress(Exception), ExitStack() as stack:
            self._side.prepare([drawn])
            for surrounding in around:
                stack.enter_context(surrounding())
            self._side.run()
            return self._side.take(keep=True)[0]
        return None

    def _add(self, found: dict[str, TensorDifference]) -> None:
        for name, row in found.items():
            known = self.rows.setdefault(name, TensorDifference())
            known.deviation = Deviation(*map(max, known.deviation, row.deviation))
            known.worst = {part: max(off, row.worst[part]) for part, off in known.worst.items()}
            known.differing = max(known.differing, row.differing)

    def excess(self, name: str, row: TensorDifference, times: float = 1.0) -> tuple[float, str]:
        """Return how many times its limit a tensor is off, and that in words."""
        known = self.rows.get(name, TensorDifference())
        if row.differing:
            most = 2 * times * known.differing
            words = f"{name} differs in {row.differing:,} of {row.size:,} integers"
            return (row.differing / most if most else math.inf), words
        control = Deviation(*(times * one for one in known.deviation))
        excess, words = beyond_limit(row.deviation, row.size, control, "output", self.precision)
        least = 2 * rounding.unit(self.precision) * (TERMS if self.precision == "fp32" else 1.0)
        for part, off in row.worst.items():
            most = WORST[part] * times * known.worst[part] + least
            in_part = math.inf if math.isnan(off) else off / most
            if in_part > max(excess, 1.0):
                explained = f"where {self.precision} explains {most:.2g}"
                excess, words = in_part, f"has {part} that is off by {off:.2g}, {explained}"
        return excess, f"{name} {words}"


def _shapes(taken: Taken) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in taken.values.items()}


def _widened(drawn: Drawn) -> Drawn:
    """Return it in float64, in the same memory layout."""

    def wide(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        is_float = value.is_floating_point()
        dtype = torch.float64 if is_float else torch.complex128 if value.is_complex() else None
        return laid_out(value, dtype)

    cotangents = {name: wide(value) for name, value in drawn.cotangents.items()}
    return replace(drawn, arguments=tree_map(wide, dict(drawn.arguments)), cotangents=cotangents)


def usual(values: Values, known: Mapping[str, float]) -> dict[str, float]:
    """Return the largest root mean square of each tensor, of these values and those before."""
    seen = {n: one for n, one in values.items() if _is_floating(one) and one.numel()}
    now = {n: float(one.norm()) / math.sqrt(one.numel()) for n, one in seen.items()}
    finite = {n: size for n, size in now.items() if math.isfinite(size)}
    return {n: max(finite.get(n, 0.0), known.get(n, 0.0)) for n in {*finite, *known}}


def rows(
    values: Values, reference: Values, least_of: Mapping[str, float] | None = None
) -> dict[str, TensorDifference]:
    """Compare what both have, or one has: a gradient that is missing stands for zeros.

    `least_of` is the least root mean square to which a tensor is compared, by its name.
    """
    extra = [n for n in values if n.startswith(GRADIENT) and n not in reference]
    pairs = {name: (values.get(name), reference.get(name)) for name in (*reference, *extra)}
    floats = {name: pair for name, pair in pairs.items() if all(map(_is_floating, pair))}
    parts = dict(zip(floats, sums(list(floats.values())), strict=True))
    gradients = total([part for name, part in parts.items() if name.startswith(GRADIENT)])
    least = SMALL * math.sqrt(gradients.square / max(gradients.size, 1))
    found = {}
    for name, (one, other) in pairs.items():
        if name in parts:
            part = parts[name]
            floor = least if name.startswith(GRADIENT) and math.isfinite(least) else 0.0
            floor = max(floor, (least_of or {}).get(name, 0.0))
            typical = max(math.sqrt(part.square / max(part.size, 1)), floor)
            found[name] = TensorDifference(
                part.deviation(floor), _worst(one, other, typical), 0, part.size
            )
        elif one is not None and other is not None:
            found[name] = TensorDifference(differing=int((one != other).sum()), size=other.numel())
    return found


def _is_floating(one: torch.Tensor | None) -> bool:
    return one is None or one.is_floating_point() or one.is_complex()


def _worst(
    tensor: torch.Tensor | None, reference: torch.Tensor | None, mean: float
) -> dict[str, float]:
    """Return the largest distance of a row, a column and an element, each over its norm or that of
    a typical one.
    """
    if tensor is None or reference is None or not reference.numel():
        return dict.fromkeys(WORST, 0.0)
    off, size = tensor - reference, reference.abs()
    if not (off.abs().sum() + size.sum()).isfinite():
        alike = (tensor == reference) | ((tensor != tensor) & (reference != reference))
        off, size = off.masked_fill(alike, 0), size.nan_to_num(0, 0, 0)
    found = {"an element": (off.abs() / size.clamp(min=mean or NOTHING)).max()}
    if reference.dim() > 1:
        for part, dim in (("a row", 1), ("a column", 0)):
            rows, sizes = (one.reshape(-1, one.shape[-1]) for one in (off, size))
            typical = mean * math.sqrt(sizes.shape[dim]) or NOTHING
            found[part] = (rows.norm(dim=dim) / sizes.norm(dim=dim).clamp(min=typical)).max()
    worst = torch.stack([*found.values()]).tolist()
    return {**dict.fromkeys(WORST, 0.0), **dict(zip(found, worst, strict=True))}


def form_faults(found: Taken, own: Taken) -> list[str]:
    """Return what differs in form from what the reference gives: parts, their classes, shapes and
    dtypes, shared memory, what is written to, infinite numbers where it has finite ones.
    """
    faults = list(found.faults)
    for name in {**own.forms, **found.forms}:
        mine, theirs = found.forms.get(name), own.forms.get(name)
        if mine and theirs:
            faults += [f"{name} is {mine:.80}, not {theirs:.80}"] if mine != theirs else []
        elif not name.startswith((GRADIENT, INPUT, BUFFER)):
            faults.append(f"{name} is {'one result too many' if mine else 'missing'}")
    for name in own.values.keys() & found.values.keys() if not faults else ():
        if (~found.values[name].isfinite() & own.values[name].isfinite()).any():
            faults.append(f"{name} has NaN or infinite numbers where the reference has none")
    aliases = [name for name in found.aliases if name not in own.aliases]
    faults += [f"{name} shares memory with an input" for name in aliases]
    faults += [f"it changes its {name}" for name in found.written if name not in own.written]
    return faults + [f"it leaves its {n} as it was" for n in own.written if n not in found.written]
