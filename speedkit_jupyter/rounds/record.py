"""The record of one variant in a benchmark, and the environment of a result."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from speedkit_jupyter.catalog import named
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.planning import describe
from speedkit_jupyter.right.judge import Accuracy
from speedkit_jupyter.rounds.budget import Compilations
from speedkit_jupyter.rounds.statistics import Ratio, are_interrupted, paired_ratio
from speedkit_jupyter.step.memory import MemoryUse
from speedkit_jupyter.support import __version__


@dataclass(frozen=True)
class TokenTimes:
    """The seconds of a step that generates `tokens` tokens: of the prompt, then of each token."""

    tokens: int
    prompt_s: float
    token_s: float  # median
    p99_s: float


@dataclass
class Record:
    """The results of one variant; times are seconds per step, in the order of rounds."""

    name: str
    times_s: list[float] = field(default_factory=list)
    first_call_s: float | None = None  # including compilation
    settling_s: float = 0.0  # extra seconds of warm-up steps
    failure: str | None = None  # the error in one line
    declined: bool = False  # True if its whole plan was declined
    declines: dict[str, str] = field(default_factory=dict)  # the reasons of declined parts
    accuracy: Accuracy | None = None
    same_as_baseline: bool = False
    applied: dict[str, Any] = field(default_factory=dict)  # the changes by its plan
    notes: dict[str, str] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)  # the same as config words
    changes_model: dict[str, Any] = field(default_factory=dict)  # values that change the model
    memory: MemoryUse | None = None
    compilations: Compilations = field(default_factory=Compilations)
    score: float | None = None  # the user's accuracy under this plan
    waited_s: list[float] = field(default_factory=list)  # possible delays, by round
    steps_s: list[float] = field(default_factory=list)  # each step of the rounds
    tokens: TokenTimes | None = None  # if the step generates text

    def anew(self) -> Record:
        """Return the variant without its times and without notes about the budget."""
        about = ("left out", "dropped")
        notes = {name: note for name, note in self.notes.items() if name not in about}
        return replace(self, times_s=[], waited_s=[], steps_s=[], tokens=None, notes=notes)

    def add(self, seconds: float, waited_s: float) -> None:
        self.times_s.append(seconds)
        self.waited_s.append(waited_s)

    def note_warm_up(self, first_call_s: float, settling_s: float = 0.0) -> None:
        """Record the longest warm-up, because only the first one compiles."""
        self.first_call_s = max(self.first_call_s or 0.0, first_call_s)
        self.settling_s = max(self.settling_s, settling_s)

    def fail(self, why: str) -> None:
        """Record the variant's failure, and drop its times."""
        self.failure, self.times_s, self.waited_s = why, [], []

    @property
    def p99_s(self) -> float | None:
        """Return the 99th percentile of a step, or of a token if the step generates text.

        It is the slowest one of fewer than 100; None without a step.
        """
        if self.tokens is not None:
            return self.tokens.p99_s
        return percentile_99(self.steps_s) if self.steps_s else None

    @property
    def is_compiled(self) -> bool:
        return any(named(name).costly for name in self.applied)

    @property
    def why_not_measured(self) -> str:
        """Return the reason why the variant was left out; empty without one."""
        short = self.notes.get("left out")
        return self.notes.get("dropped") or (f"left out: {short}" if short else "")

    @property
    def is_checked(self) -> bool:
        """Return whether the accuracy check reached a verdict."""
        return self.accuracy is None or self.accuracy.verdict != "not checked"

    @property
    def interrupted(self) -> list[bool]:
        return are_interrupted(self.times_s, self.waited_s)

    def is_other_model(self, baseline: Record) -> bool:
        """Return whether the plan changes the model's results, so that speed alone can't win."""
        return self.changes_model != baseline.changes_model


def percentile_99(times_s: Sequence[float]) -> float:
    """Return the smallest time that at least 99 % of the times do not exceed."""
    return sorted(times_s)[math.ceil(0.99 * len(times_s)) - 1]


def ratio_of(before: Record, after: Record, error: float) -> Ratio | None:
    """Return the speed-up of `after` over `before`, by common rounds; None without rounds."""
    pairs = min(len(before.times_s), len(after.times_s))
    if not pairs:
        return None
    waited_s = [(record.waited_s + [0.0] * pairs)[:pairs] for record in (before, after)]
    return paired_ratio(before.times_s[:pairs], after.times_s[:pairs], error, waited_s)


def environment(device: torch.device) -> dict[str, Any]:
    """Return device, versions, time and CPU threads of a result.

    `planned_for` is the machine of the plans, if it is another one.
    """
    hardware, planned_for = Hardware.detect(), Hardware.current().pinned
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "device": describe(hardware, str(device)),
        "torch": hardware.torch,
        "python": hardware.python,
        "system": hardware.system,
        "speedkit": __version__,
        "measured_at": now.isoformat(timespec="seconds"),
        **({"threads": torch.get_num_threads()} if device.type == "cpu" else {}),
        **({"planned_for": planned_for} if planned_for else {}),
    }
