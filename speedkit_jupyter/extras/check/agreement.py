"""Whether values agree with the truth, which is the reference in float64.

`right.tolerance` says what a dtype's rounding explains. Here its limits of outputs hold for
gradients too, since a single function has fewer places where rounding is decisive than a net has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from speedkit_jupyter.extras.check.calls import BUFFER, GRADIENT, INPUT, CallResult, LocalSide
from speedkit_jupyter.extras.check.inputs import CallInputs, Values
from speedkit_jupyter.extras.check.result import Agreement
from speedkit_jupyter.right.reference import in_float64, rounded, unit
from speedkit_jupyter.right.tolerance import NOTHING, TERMS, Deviation, beyond_limit, sums, total

# Limits for the worst row, column and element, as multiples of the worst ones that rounding
# explains: a single element's error scatters more than the norm of a row.
WORST = {"row": 4.0, "column": 4.0, "element": 8.0}
# A gradient is compared relative to this share of the root mean square of all at least: a smaller
# one may be what rounding left of a zero, as of the keys where there is only one.
SMALL = 1e-2


class TensorDifference(NamedTuple):
    """A tensor's deviation by norm, scale and bias, its worst row, column and element, and the
    number of integers that differ.
    """

    distance: float = 0.0
    scale: float = 0.0
    bias: float = 0.0
    row: float = 0.0
    column: float = 0.0
    element: float = 0.0
    differing: int = 0
    size: int = 0


class RoundingLimits:
    """The truth of calls of one size, and for each tensor the largest deviation of the reference,
    which is `side`, and of its controls. A tensor is compared with its root mean square in `values`
    of another call, if that is larger: a few values that cancel in one call are no measure.
    """

    def __init__(self, side: LocalSide, precision: str, values: Values) -> None:
        self._precision, self._side = precision, side
        self._wide = partial(in_float64, [side.function] if side.state else [])
        floats = {n: one.norm() for n, one in values.items() if _is_floating(one) and one.numel()}
        sizes = {n: float(norm) / math.sqrt(values[n].numel()) for n, norm in floats.items()}
        self._usual = {n: size for n, size in sizes.items() if math.isfinite(size)}
        self._rows: dict[str, TensorDifference] = {}

    def truth(self, drawn: CallInputs, own: CallResult) -> Values:
        """Return the values of a call in float64, or its `own` where float64 can't be run."""
        wide = drawn.copied(wide=True)
        found = self._run(wide, self._wide)
        truth = found if found is not None and _shapes(found) == _shapes(own) else own
        self._add(self.rows(own.values, truth.values))
        for to_nearest in (False, True):
            control = partial(rounded, self._precision, to_nearest)
            is_plain = self._precision == "fp32"
            run = self._run(drawn, control) if is_plain else self._run(wide, self._wide, control)
            if run is not None and _shapes(run) == _shapes(truth):
                self._add(self.rows(run.values, truth.values))
        return truth.values

    def _run(
        self, drawn: CallInputs, *around: Callable[[], AbstractContextManager[Any]]
    ) -> CallResult | None:
        """Return the reference's result; None where the surroundings don't allow it."""
        with suppress(Exception), ExitStack() as stack:
            self._side.prepare([drawn])
            for surrounding in around:
                stack.enter_context(surrounding())
            self._side.run()
            return self._side.take()[0]
        return None

    def _add(self, found: dict[str, TensorDifference]) -> None:
        for name, row in found.items():
            known = self._rows.get(name, TensorDifference())
            self._rows[name] = TensorDifference._make(map(max, known, row))

    def compared(self, values: Values, reference: Values, times: float = 1.0) -> list[Agreement]:
        """Return how far each tensor is off; limits are `times` as wide as to float64."""
        return [self._agreement(n, row, times) for n, row in self.rows(values, reference).items()]

    def _agreement(self, name: str, row: TensorDifference, times: float) -> Agreement:
        known = self._rows.get(name, TensorDifference())
        if row.differing:
            most = 2 * times * known.differing
            excess = row.differing / most if most else math.inf
            words = f"differs in {row.differing:,} of {row.size:,} integers"
        else:
            control = Deviation(*(times * one for one in known[:3]))
            off = Deviation(*row[:3])
            excess, words = beyond_limit(off, row.size, control, "output", self._precision)
            least = 2 * unit(self._precision)
            least *= TERMS if self._precision == "fp32" else 1.0
            for part, limit in WORST.items():
                off_by, most = getattr(row, part), limit * times * getattr(known, part) + least
                worst = math.inf if math.isnan(off_by) else off_by / most
                if worst > max(excess, 1.0):
                    explained = f"where {self._precision} explains {most:.2g}"
                    excess = worst
                    words = f"has one {part} that is off by {off_by:.2g}, {explained}"
        fault = f"{name} {words}" if excess > 1 else ""
        return Agreement(name, row.distance, known.distance, excess, fault)

    def rows(self, values: Values, reference: Values) -> dict[str, TensorDifference]:
        """Return the difference of each tensor, by name; a missing gradient counts as zeros."""
        extra = [n for n in values if n.startswith(GRADIENT) and n not in reference]
        pairs = {name: (values.get(name), reference.get(name)) for name in (*reference, *extra)}
        floats = {name: pair for name, pair in pairs.items() if all(map(_is_floating, pair))}
        parts = dict(zip(floats, sums(list(floats.values())), strict=True))
        gradients = total([part for name, part in parts.items() if name.startswith(GRADIENT)])
        least = SMALL * math.sqrt(gradients.square / max(gradients.size, 1))
        least = least if math.isfinite(least) else 0.0
        found = {}
        for name, (one, other) in pairs.items():
            if name in parts:
                part = parts[name]
                floor = max(least if name.startswith(GRADIENT) else 0.0, self._usual.get(name, 0.0))
                typical = max(math.sqrt(part.square / max(part.size, 1)), floor)
                worst = _worst_parts(one, other, typical)
                found[name] = TensorDifference._make((*part.deviation(floor), *worst, 0, part.size))
            elif one is not None and other is not None:
                differing = int((one != other).sum())
                found[name] = TensorDifference(differing=differing, size=other.numel())
        return found


def _shapes(result: CallResult) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in result.values.items()}


def _is_floating(one: torch.Tensor | None) -> bool:
    return one is None or one.is_floating_point() or one.is_complex()


def _worst_parts(
    tensor: torch.Tensor | None, reference: torch.Tensor | None, typical: float
) -> list[float]:
    """Return the largest distance of a row, a column and an element, each over its norm or the norm
    of a part of `typical` elements, if that is larger.
    """
    if tensor is None or reference is None or not reference.numel():
        return [0.0] * 3
    off, size = (tensor - reference).abs(), reference.abs()
    if not (off.sum() + size.sum()).isfinite():
        alike = (tensor == reference) | (tensor.isnan() & reference.isnan())
        off, size = off.masked_fill(alike, 0), size.nan_to_num(0, 0, 0)
    found = [(off / size.clamp(min=typical or NOTHING)).max()]
    if reference.dim() > 1:
        off, size = (one.reshape(-1, one.shape[-1]) for one in (off, size))
        for dim in (0, 1):
            least = typical * math.sqrt(size.shape[dim]) or NOTHING
            found.insert(0, (off.norm(dim=dim) / size.norm(dim=dim).clamp(min=least)).max())
    return [0.0] * (3 - len(found)) + torch.stack(found).tolist()


def form_faults(found: CallResult, own: CallResult) -> list[str]:
    """Return differences in form from the reference's result: parts, their classes, shapes and
    dtypes, shared memory, inputs that are written to, infinite numbers where it has finite ones.
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
