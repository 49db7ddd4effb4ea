"""What a check found."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from speedkit_jupyter.rounds.presentable import Shown
from speedkit_jupyter.rounds.record import Record, ratio_of
from speedkit_jupyter.rounds.statistics import ERROR, Ratio


@dataclass
class Agreement:
    """How far one tensor is off, over the norm of the reference, and how many times its limit."""

    name: str
    distance: float
    explained: float  # by rounding: the reference itself, or a control
    excess: float


@dataclass
class SizeCheck:
    """One size: what is wrong, how far each tensor is off, and the times of both.

    `skipped` is why it was left out, `unchecked` why what was asked for could not be compared, and
    `untold` why the times tell nothing.
    """

    name: str
    size: Any
    skipped: str = ""
    unchecked: str = ""
    untold: str = ""
    faults: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    precision: str = ""
    reference: Record = field(default_factory=lambda: Record("reference"))
    candidate: Record = field(default_factory=lambda: Record("candidate"))
    error: float = ERROR

    @property
    def passed(self) -> bool:
        """Return whether it was checked and nothing is wrong."""
        return not (self.skipped or self.unchecked or self.faults)

    @property
    def ratio(self) -> Ratio | None:
        """Return how many times as fast the candidate is; None where that was not found."""
        is_known = self.passed and not self.untold
        return ratio_of(self.reference, self.candidate, self.error) if is_known else None

    @property
    def worst(self) -> Agreement | None:
        """Return the tensor that comes nearest to its limit."""
        return max(self.agreements, key=lambda one: one.excess, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; what is infinite or unknown is None."""
        ratio = self.ratio
        bounded = ratio if ratio and ratio.is_bounded else None
        values: dict[str, Any] = {
            "name": self.name,
            "size": self.size if isinstance(self.size, int | tuple | None) else str(self.size),
            "passed": self.passed,
            "skipped": self.skipped,
            "unchecked": self.unchecked,
            "untold": self.untold,
            "precision": self.precision,
            "speed": ratio and ratio.verdict,
            "speedup": ratio and ratio.median,
            "low": bounded and bounded.low,
            "high": bounded and bounded.high,
        }
        for one in (self.reference, self.candidate):
            values[f"{one.name}_s"] = median(one.times_s) if one.times_s else None
            values[f"{one.name}_peak_bytes"] = one.memory and one.memory.peak_bytes
            values[f"{one.name}_times_s"] = one.times_s
        agreements = [
            {n: v if isinstance(v, str) or math.isfinite(v) else None for n, v in vars(one).items()}
            for one in self.agreements
        ]
        return {**values, "faults": self.faults, "agreements": agreements}


@dataclass(frozen=True, repr=False)
class Check(Shown):
    """Whether a candidate computes what its reference does, and how fast, size by size.

    `isolated` is whether each ran in a process of its own. `remarks` are what was not compared.
    """

    REPORTS = f"{__package__}.report"

    candidate: str
    reference: str
    sizes: tuple[SizeCheck, ...]
    isolated: bool
    environment: dict[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Return whether all sizes that were not skipped are right, and one was checked at all."""
        return self.verdict == "right"

    @property
    def verdict(self) -> str:
        """Return right, wrong or not checked."""
        checked = [one for one in self.sizes if not one.skipped]
        if self.faults:
            return "wrong"
        return "right" if checked and all(one.passed for one in checked) else "not checked"

    @property
    def faults(self) -> list[str]:
        """Return what is wrong, each with its size."""
        return [f"{one.name}: {fault}" for one in self.sizes for fault in one.faults]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        names = ("candidate", "reference", "verdict", "passed", "faults", "isolated", "environment")
        values = {name: getattr(self, name) for name in names}
        sizes = [one.to_dict() for one in self.sizes]
        return {**values, "remarks": list(self.remarks), "sizes": sizes}

    def rows(self) -> list[dict[str, Any]]:
        """Return one for each size, without lists."""
        sizes = self.to_dict()["sizes"]
        return [{n: v for n, v in one.items() if not isinstance(v, list)} for one in sizes]
