"""The result of a check and its report: the verdict with its reason, then each size."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from speedkit_jupyter.report.elements import BLANK, Row, Table
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.rounds.comparison import Record, Shown, ratio_of
from speedkit_jupyter.rounds.statistics import ERROR, INTERVAL, Ratio
from speedkit_jupyter.support.units import between, count, ratio, seconds

COLUMNS = ("size", "result", "reference", "candidate", "speed-up", INTERVAL, "off by")
# Words between a size's name and the reason why the size is not fully judged.
WHY = {"skipped": " is skipped", "unchecked": "", "no_speed": ": no speed-up is given"}
OFF = "“off by” is the norm of the difference to float64, over the norm."


@dataclass
class Agreement:
    """The difference of one tensor from its reference."""

    name: str
    distance: float  # norm of the difference ÷ norm of the reference
    explained: float  # the distance that rounding explains
    excess: float  # the difference as a multiple of its limit
    fault: str = ""  # the difference in words; empty within the limit

    def to_dict(self) -> dict[str, Any]:
        every = vars(self).items()
        return {n: v if isinstance(v, str) or math.isfinite(v) else None for n, v in every}


@dataclass
class SizeCheck:
    """The check of one size: faults, the agreement of each tensor, and the times of both sides."""

    name: str
    size: Any
    skipped: str = ""  # the reason for skipping the size
    unchecked: str = ""  # the reason for not comparing results
    no_speed: str = ""  # the reason for a missing speed-up
    faults: list[str] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    precision: str = ""
    reference: Record = field(default_factory=lambda: Record("reference"))
    candidate: Record = field(default_factory=lambda: Record("candidate"))
    error: float = ERROR

    @property
    def passed(self) -> bool:
        return not (self.skipped or self.unchecked or self.faults)

    @property
    def ratio(self) -> Ratio | None:
        """Return the candidate's speed-up; None if it is unknown or the size did not pass."""
        if not self.passed or self.no_speed:
            return None
        return ratio_of(self.reference, self.candidate, self.error)

    def to_dict(self) -> dict[str, Any]:
        ratio = self.ratio
        bounded = ratio if ratio and ratio.is_bounded else None
        values = {
            "size": self.size if isinstance(self.size, int | tuple | None) else str(self.size),
            **{name: getattr(self, name) for name in ("name", "passed", *WHY, "precision")},
            "speed": ratio and ratio.verdict,
            "speedup": ratio and ratio.median,
            "low": bounded and bounded.low,
            "high": bounded and bounded.high,
            "faults": self.faults,
            "agreements": [one.to_dict() for one in self.agreements],
        }
        for one in (self.reference, self.candidate):
            values[f"{one.name}_s"] = median(one.times_s) if one.times_s else None
            values[f"{one.name}_times_s"] = one.times_s
        return values


@dataclass(frozen=True, repr=False)
class Check(Shown):
    """The result of `check`: agreement and speed of a candidate, size by size."""

    REPORT = f"{__name__}:check_report"

    candidate: str
    reference: str
    sizes: tuple[SizeCheck, ...]
    environment: dict[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()  # about tensors that were not compared

    @property
    def passed(self) -> bool:
        return self.verdict == "right"

    @property
    def verdict(self) -> str:
        if self.faults:
            return "wrong"
        passed = [one.passed for one in self.sizes if not one.skipped]
        return "right" if passed and all(passed) else "not checked"

    @property
    def faults(self) -> list[str]:
        return [f"{one.name}: {fault}" for one in self.sizes for fault in one.faults]

    def to_dict(self) -> dict[str, Any]:
        names = ("candidate", "reference", "verdict", "passed", "faults", "environment", "remarks")
        values = {name: getattr(self, name) for name in names}
        return {**values, "sizes": [one.to_dict() for one in self.sizes]}

    def rows(self) -> list[dict[str, Any]]:
        sizes = self.to_dict()["sizes"]
        return [{n: v for n, v in one.items() if not isinstance(v, list)} for one in sizes]


def check_report(found: Check) -> Document:
    headline = f"{found.candidate} is {found.verdict}"
    if found.passed:
        passed = [one for one in found.sizes if one.passed]
        headline += f" at {count(len(passed), 'size')}"
        if (largest := passed[-1].ratio) and largest.verdict == "too noisy":
            headline += f"; too noisy to say how fast at `{passed[-1].name}`"
        elif largest:
            headline += f"; at `{passed[-1].name}` {largest} as fast as {found.reference}"
    reasons = [(one, word) for word in WHY for one in found.sizes if getattr(one, word)]
    lines = [f"{one.name}{WHY[word]}: {getattr(one, word)}." for one, word in reasons]
    content = [
        "\n".join(found.faults),
        Table(COLUMNS, [_row(one) for one in found.sizes], COLUMNS[2:6], wraps=("result",)),
        "\n".join([*lines, *found.remarks, OFF]),
    ]
    return Document(headline, content, found.to_dict())


def _row(one: SizeCheck) -> Row:
    name = f"{one.name} {'×'.join(map(str, one.size))}" if isinstance(one.size, tuple) else one.name
    if one.skipped or one.unchecked:
        return Row((name, "skipped" if one.skipped else "not checked", *[BLANK] * 5), "quiet")
    speed, sides = one.ratio, (one.reference, one.candidate)
    worst = max(one.agreements, key=lambda each: each.excess, default=None)
    cells = (
        name,
        "wrong" if one.faults else f"right, {speed.verdict}" if speed else "right",
        *(seconds(median(side.times_s)) if side.times_s else BLANK for side in sides),
        ratio(speed.median) if speed else BLANK,
        between(speed.low, speed.high) if speed else BLANK,
        f"{worst.distance:.2g}" if worst else BLANK,
    )
    return Row(cells, "bad" if one.faults else "good")
