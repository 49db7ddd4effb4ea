"""Compare results with a reference: values within rounding errors, types, changed inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from speedkit_jupyter.extras.check.calls import BUFFER, GRADIENT, INPUT, CallResult, Side
from speedkit_jupyter.extras.check.inputs import CallInputs, Values
from speedkit_jupyter.extras.check.result import Agreement
from speedkit_jupyter.right.deviations import NOTHING, Deviation, sums, total
from speedkit_jupyter.right.judge import TERMS, beyond_limit
from speedkit_jupyter.right.reference import in_float64, rounded, unit

# Limits for the worst row, column and element, as multiples of the largest errors that rounding
# explains. A single element's error varies more than the norm of a row's errors.
WORST = {"row": 4.0, "column": 4.0, "element": 8.0}
# A gradient is compared relative to at least this share of the root mean square of all gradients: a
# smaller gradient may be a rounded zero, such as a key's gradient in attention to a single key.
SMALL = 1e-2


class TensorDifference(NamedTuple):
    """The errors of a tensor; for integers, the number of elements that differ."""

    distance: float = 0.0
    scale: float = 0.0
    bias: float = 0.0
    row: float = 0.0
    column: float = 0.0
    element: float = 0.0
    differing: int = 0
    size: int = 0


class RoundingLimits:
    """The largest errors of each tensor against float64 that rounding explains, at one size.

    They are measured on runs of the reference, `side`. `values` are typical results.
    """

    def __init__(self, side: Side, precision: str, values: Values) -> None:
        self._precision, self._side = precision, side
        self._wide = partial(in_float64, [side.function] if side.state else [])
        # Deviations are relative to at least the typical RMS, because values may cancel.
        floats = {n: one for n, one in values.items() if _is_floating(one) and one.numel()}
        usual = {n: float(one.norm()) / math.sqrt(one.numel()) for n, one in floats.items()}
        self._usual = {name: size for name, size in usual.items() if math.isfinite(size)}
        self._known: dict[str, TensorDifference] = {}

    def truth(self, drawn: CallInputs, own: CallResult) -> Values:
        """Return the call's values in float64 (`own.values` if that fails); widen the limits."""
        wide, is_plain = drawn.copied(wide=True), self._precision == "fp32"
        truth = self._run(own, wide, self._wide) or own
        self._add(own.values, truth.values)
        for to_nearest in (False, True):
            control = partial(rounded, self._precision, to_nearest)
            around = [control] if is_plain else [self._wide, control]
            if run := self._run(own, drawn if is_plain else wide, *around):
                self._add(run.values, truth.values)
        return truth.values

    def _run(
        self, own: CallResult, drawn: CallInputs, *around: Callable[[], AbstractContextManager[Any]]
    ) -> CallResult | None:
        """Run the reference in the contexts `around`; return None if it fails or shapes differ."""
        with suppress(Exception):
            _, (found,) = self._side.calls([drawn], *around)
            first, second = ({n: t.shape for n, t in one.values.items()} for one in (found, own))
            return found if first == second else None
        return None

    def _add(self, values: Values, truth: Values) -> None:
        for name, row in self._differences(values, truth).items():
            known = self._known.get(name, TensorDifference())
            self._known[name] = TensorDifference._make(map(max, known, row))

    def compared(self, values: Values, reference: Values, times: float = 1.0) -> list[Agreement]:
        """Return the agreement of each tensor; the limits are multiplied by `times`."""
        found = self._differences(values, reference)
        return [self._agreement(name, row, times) for name, row in found.items()]

    def _agreement(self, name: str, row: TensorDifference, times: float) -> Agreement:
        known = self._known.get(name, TensorDifference())
        if row.differing:
            most = 2 * times * known.differing
            excess = row.differing / most if most else math.inf
            words = f"differs in {row.differing:,} of {row.size:,} integers"
        else:
            control, off = Deviation(*(times * one for one in known[:3])), Deviation(*row[:3])
            # Gradients get the limits for outputs: unlike a network, a function has few thresholds
            # or maxima that rounding can switch.
            excess, words = beyond_limit(off, row.size, control, "output", self._precision)
            least = 2 * unit(self._precision) * (TERMS if self._precision == "fp32" else 1.0)
            for part, limit in WORST.items():
                off_by, most = getattr(row, part), limit * times * getattr(known, part) + least
                worst = math.inf if math.isnan(off_by) else off_by / most
                if worst > max(excess, 1.0):
                    excess, explained = worst, f"where {self._precision} explains {most:.2g}"
                    words = f"has one {part} that is off by {off_by:.2g}, {explained}"
        fault = f"{name} {words}" if excess > 1 else ""
        return Agreement(name, row.distance, known.distance, excess, fault)

    def _differences(self, values: Values, reference: Values) -> dict[str, TensorDifference]:
        """Return each tensor's difference by name; a missing gradient counts as zeros."""
        extra = [n for n in values if n.startswith(GRADIENT) and n not in reference]
        pairs = {name: (values.get(name), reference.get(name)) for name in (*reference, *extra)}
        floats = {name: pair for name, pair in pairs.items() if all(map(_is_floating, pair))}
        parts = dict(zip(floats, sums(list(floats.values())), strict=True))
        gradients = total([part for name, part in parts.items() if name.startswith(GRADIENT)])
        least = SMALL * gradients.mean if math.isfinite(gradients.mean) else 0.0
        found = {}
        for name, (one, other) in pairs.items():
            if name in parts:
                part = parts[name]
                floor = max(least if name.startswith(GRADIENT) else 0.0, self._usual.get(name, 0.0))
                # If values cancel, errors come from terms of unknown size: elements go unchecked.
                both = (one, other) if part.mean >= SMALL * floor else (None, None)
                worst = _worst_parts(*both, max(part.mean, floor))
                found[name] = TensorDifference._make((*part.deviation(floor), *worst, 0, part.size))
            elif one is not None and other is not None:
                differing = int((one != other).sum())
                found[name] = TensorDifference(differing=differing, size=other.numel())
        return found


def _is_floating(one: torch.Tensor | None) -> bool:
    return one is None or one.is_floating_point() or one.is_complex()


def _worst_parts(
    tensor: torch.Tensor | None, reference: torch.Tensor | None, typical: float
) -> list[float]:
    """Return the errors of the worst row, column and element, relative to at least `typical`."""
    if tensor is None or reference is None or not reference.numel():
        return [0.0] * 3
    wide = torch.promote_types(reference.dtype, torch.float32)
    off, size = (tensor.to(wide) - reference.to(wide)).abs(), reference.to(wide).abs()
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
    """Return the faults of `found`, and differences from `own` in types, NaN, aliases, writes."""
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
    shared = {*found.aliases} - {*own.aliases}
    faults += [f"{name} shares memory with an input" for name in sorted(shared)]
    faults += [f"it changes its {name}" for name in found.written if name not in own.written]
    return faults + [f"it leaves its {n} as it was" for n in own.written if n not in found.written]
