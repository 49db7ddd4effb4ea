"""Whether values agree with the truth, which is the reference in float64: each tensor, and its
worst row.

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

from speedkit_jupyter.extras.check.calls import BUFFER, GRADIENT, Drawn, Here, Taken, Values
from speedkit_jupyter.right import rounding
from speedkit_jupyter.right.deviations import NOTHING, Deviation, sums, total
from speedkit_jupyter.right.reference import in_float64
from speedkit_jupyter.right.tolerance import TERMS, beyond_limit
from speedkit_jupyter.torchglue.private import tree_map

# The worst row may be so many times as far off as that of what rounding explains.
ROW = 4.0
# A gradient is compared relative to this share of the root mean square of all at least: a smaller
# one may be what rounding left of a zero, as of the keys where there is only one.
SMALL = 1e-2
# A round is compared with the reference's own result, whose error adds to that of the candidate.
BOTH = 2.0


@dataclass
class TensorDifference:
    """How far one tensor is off its reference, all of it and its worst row."""

    deviation: Deviation = field(default_factory=Deviation)
    worst_row: float = 0.0
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
            return self._side.take(full=True)[0]
        return None

    def _add(self, found: dict[str, TensorDifference]) -> None:
        for name, row in found.items():
            known = self.rows.setdefault(name, TensorDifference())
            known.deviation = Deviation(*map(max, known.deviation, row.deviation))
            known.worst_row = max(known.worst_row, row.worst_row)
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
        most = ROW * times * known.worst_row + least
        in_row = math.inf if math.isnan(row.worst_row) else row.worst_row / most
        if in_row > max(excess, 1.0):
            explained = f"where {self.precision} explains {most:.2g}"
            excess, words = in_row, f"has a row that is off by {row.worst_row:.2g}, {explained}"
        return excess, f"{name} {words}"


def _shapes(taken: Taken) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in taken.values.items()}


def _widened(drawn: Drawn) -> Drawn:
    """Return it in float64."""

    def wide(value: Any) -> Any:
        is_float = hasattr(value, "is_floating_point") and value.is_floating_point()
        return value.double() if is_float else value

    arguments = tree_map(wide, dict(drawn.arguments))
    return replace(drawn, arguments=arguments, cotangents=tree_map(wide, drawn.cotangents))


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
            worst_row = _worst_row(one, other, typical)
            found[name] = TensorDifference(part.deviation(floor), worst_row, 0, part.size)
        elif one is not None and other is not None:
            found[name] = TensorDifference(differing=int((one != other).sum()), size=other.numel())
    return found


def _is_floating(one: torch.Tensor | None) -> bool:
    return one is None or one.is_floating_point() or one.is_complex()


def _worst_row(tensor: torch.Tensor | None, reference: torch.Tensor | None, mean: float) -> float:
    """Return the largest distance of a row, over its norm or that of a typical one."""
    if tensor is None or reference is None or reference.dim() < 2 or not reference.numel():
        return 0.0
    length = reference.shape[-1]
    difference = (tensor - reference).reshape(-1, length)
    alike = (tensor == reference) | ((tensor != tensor) & (reference != reference))
    difference = difference.masked_fill(alike.reshape(-1, length), 0)
    norms = reference.reshape(-1, length).nan_to_num(0, 0, 0).norm(dim=-1)
    typical = norms.clamp(min=mean * math.sqrt(length) or NOTHING)
    return float((difference.norm(dim=-1) / typical).max())


def form_faults(found: Taken, own: Taken, drawn: Drawn) -> list[str]:
    """Return what differs in form from what the reference gives: names, shapes, dtypes, classes,
    shared memory, infinite numbers where it has finite ones.
    """
    needed = {name for name in own.values if not name.startswith((GRADIENT, BUFFER))}
    missing = sorted(needed - found.values.keys())
    faults = [*found.faults, *(f"{name} is missing" for name in missing)]
    extra = sorted(found.classes.keys() - own.classes.keys())
    faults += [f"{name} is one result too many" for name in extra]
    for name, value in found.values.items():
        if (expected := own.values.get(name)) is None:
            continue
        for what, mine, theirs in (
            ("shape", tuple(value.shape), tuple(expected.shape)),
            ("dtype", str(value.dtype)[6:], str(expected.dtype)[6:]),
            ("device", str(value.device), str(expected.device)),
            ("class", found.classes.get(name), own.classes.get(name)),
        ):
            if mine != theirs:
                faults.append(f"{name} has the {what} {mine}, not {theirs}")
        if value.shape == expected.shape and (~value.isfinite() & expected.isfinite()).any():
            faults.append(f"{name} has NaN or infinite numbers where the reference has none")
    aliases = [name for name in found.aliases if name not in own.aliases]
    faults += [f"{name} shares memory with an input" for name in aliases]
    written = own.written(drawn)
    changed = [name for name in found.written(drawn) if name not in written]
    return faults + [f"it changes its {name}" for name in changed]
