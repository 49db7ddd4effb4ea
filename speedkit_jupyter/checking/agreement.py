"""Whether values agree with their reference: tensor by tensor, and in their worst row.

`measure.checks` says what a dtype's rounding explains; here its limits of outputs hold for
gradients too, since a single function has fewer places where rounding is decisive than a net has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from speedkit_jupyter.checking.calls import (
    BUFFER,
    GRADIENT,
    INPUT,
    Drawn,
    Taken,
    Values,
    are_equal,
    inputs_of,
)
from speedkit_jupyter.measure.checks.deviations import NOTHING, Deviation, sums, total
from speedkit_jupyter.measure.checks.rounding import unit
from speedkit_jupyter.measure.checks.tolerance import TERMS, beyond_limit

if TYPE_CHECKING:
    import torch

# The worst row may be so many times as far off as that of what rounding explains.
ROW = 4.0
# A gradient is compared relative to this share of the root mean square of all at least: a smaller
# one may be what rounding left of a zero, as of the keys where there is only one.
SMALL = 1e-2
# A round is compared with the reference's own result, whose error adds to that of the candidate.
BOTH = 2.0


@dataclass
class Row:
    """How far one tensor is off its reference, all of it and its worst row."""

    deviation: Deviation = field(default_factory=Deviation)
    worst_row: float = 0.0
    differing: int = 0  # of integers
    size: int = 0


@dataclass
class Explained:
    """What rounding explains, by name: the largest deviations of the reference and controls."""

    precision: str
    rows: dict[str, Row] = field(default_factory=dict)

    def add(self, found: dict[str, Row]) -> None:
        """Let it explain what one more run deviates by."""
        for name, row in found.items():
            known = self.rows.setdefault(name, Row())
            pairs = zip(known.deviation, row.deviation, strict=True)
            known.deviation = Deviation(*(max(a, b) for a, b in pairs))
            known.worst_row = max(known.worst_row, row.worst_row)
            known.differing = max(known.differing, row.differing)

    def excess(self, name: str, row: Row, times: float = 1.0) -> tuple[float, str]:
        """Return how many times its limit a tensor is off, and that in words."""
        known = self.rows.get(name, Row())
        if row.differing:
            most = 2 * times * known.differing
            words = f"{name} differs in {row.differing:,} of {row.size:,} integers"
            return (row.differing / most if most else math.inf), words
        control = Deviation(*(times * one for one in known.deviation))
        excess, words = beyond_limit(row.deviation, row.size, control, "output", self.precision)
        least = 2 * unit(self.precision) * (TERMS if self.precision == "fp32" else 1.0)
        most = ROW * times * known.worst_row + least
        in_row = math.inf if math.isnan(row.worst_row) else row.worst_row / most
        if in_row > max(excess, 1.0):
            explained = f"where {self.precision} explains {most:.2g}"
            excess, words = in_row, f"has a row that is off by {row.worst_row:.2g}, {explained}"
        return excess, f"{name} {words}"


def rows(values: Values, reference: Values) -> dict[str, Row]:
    """Compare what both have, or one has: a gradient that is missing stands for zeros."""
    pairs = {name: (values.get(name), one) for name, one in reference.items()}
    extra = values.keys() - pairs.keys()
    pairs |= {name: (values[name], None) for name in extra if name.startswith(GRADIENT)}
    floats = {name: pair for name, pair in pairs.items() if _are_floating(pair)}
    parts = dict(zip(floats, sums(list(floats.values())), strict=True))
    gradients = total([part for name, part in parts.items() if name.startswith(GRADIENT)])
    least = SMALL * math.sqrt(gradients.square / max(gradients.size, 1))
    found = {}
    for name, pair in pairs.items():
        if name in parts:
            part = parts[name]
            floor = least if name.startswith(GRADIENT) and math.isfinite(least) else 0.0
            typical = max(math.sqrt(part.square / max(part.size, 1)), floor)
            worst_row = _worst_row(*pair, typical)
            found[name] = Row(part.deviation(floor), worst_row, 0, part.size)
        elif pair[0] is not None and pair[1] is not None:
            found[name] = Row(differing=int((pair[0] != pair[1]).sum()), size=pair[1].numel())
    return found


def _are_floating(pair: Sequence[torch.Tensor | None]) -> bool:
    return all(one is None or one.is_floating_point() or one.is_complex() for one in pair)


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
    faults = list(found.faults)
    needed = {name for name in own.values if not name.startswith((GRADIENT, BUFFER))}
    missing = sorted(needed - found.values.keys())
    extra = sorted(found.classes.keys() - own.classes.keys())
    faults += [f"{name} is missing" for name in missing]
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
    aliases = sorted(set(found.aliases) - set(own.aliases))
    faults += [f"{name} shares memory with an input" for name in aliases]
    written = written_inputs(own, drawn)
    extra = [name for name in written_inputs(found, drawn) if name not in written]
    return faults + [f"it changes its {name}" for name in extra]


def written_inputs(taken: Taken, drawn: Drawn) -> list[str]:
    """Return the names of the inputs that a call has left with other values."""
    pairs = [(INPUT + name, before) for name, before in inputs_of(drawn.arguments)]
    return [name for name, before in pairs if not are_equal(taken.values[name], before)]
