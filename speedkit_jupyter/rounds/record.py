"""The results of a benchmark for one variant, with their environment."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.planning import describe
from speedkit_jupyter.right.accuracy import Accuracy
from speedkit_jupyter.right.named_accuracy import Scored
from speedkit_jupyter.rounds.compilations import Compilations
from speedkit_jupyter.rounds.statistics import SAME, Ratio, paired_ratio
from speedkit_jupyter.step.memory import MemoryUse
from speedkit_jupyter.support import __version__

# Notes about the time that one measurement had.
OF_ITS_TIME = ("left out", "dropped", "budget", "limits")


@dataclass
class Record:
    """One variant. Times are seconds of one step, in the order of the rounds; `waited_s` are the
    seconds in which other processes may have held the cores.

    `applied` is what its plan changes, `plan` the same in the config's words, `changes_model` what
    of it makes another model. `first_call_s` holds compilation, `settling_s` is what all warm-up
    steps took beyond ordinary ones. `declines` are the reasons of what was refused of the plan;
    `declined` says that nothing is left of it, and `failure` why. `score` is the user's own number
    for the baseline and under this plan.
    """

    name: str
    times_s: list[float] = field(default_factory=list)
    first_call_s: float | None = None
    settling_s: float = 0.0
    failure: str | None = None
    declined: bool = False
    declines: dict[str, str] = field(default_factory=dict)
    accuracy: Accuracy | None = None
    same_as_baseline: bool = False
    applied: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    changes_model: dict[str, Any] = field(default_factory=dict)
    memory: MemoryUse | None = None
    compilations: Compilations = field(default_factory=Compilations)
    score: Scored | None = None
    waited_s: list[float] = field(default_factory=list)

    def anew(self) -> Record:
        """Return the same variant without its times."""
        notes = {name: note for name, note in self.notes.items() if name not in OF_ITS_TIME}
        return replace(self, times_s=[], waited_s=[], notes=notes)

    def add(self, seconds: float, waited_s: float) -> None:
        """Note the seconds of a step in one round, and of waiting in it."""
        self.times_s.append(seconds)
        self.waited_s.append(waited_s)

    def note_warm_up(self, first_call_s: float, settling_s: float = 0.0) -> None:
        """Note a warm-up; of several the slowest, since a later one compiles nothing."""
        self.first_call_s = max(self.first_call_s or 0.0, first_call_s)
        self.settling_s = max(self.settling_s, settling_s)

    def fail(self, why: str) -> None:
        """Note why it failed; its times say nothing then."""
        self.failure, self.times_s, self.waited_s = why, [], []

    @property
    def is_compiled(self) -> bool:
        """Return whether torch.compile is a part of its plan."""
        return bool(self.applied.get("compile"))

    @property
    def why_not_measured(self) -> str:
        """Return what was seen of it, or how short the time was; empty if nothing is known."""
        short = self.notes.get("left out")
        return self.notes.get("dropped") or (f"left out: {short}" if short else "")

    @property
    def is_checked(self) -> bool:
        """Return False if it was not checked that it computes the same as the baseline."""
        return self.accuracy is None or self.accuracy.verdict != "not checked"

    @property
    def interrupted(self) -> list[bool]:
        """Return whether each of the times may hold waiting that a ratio would show."""
        waited_s = zip(self.times_s, self.waited_s, strict=False)  # may be unknown
        return [waited > SAME * seconds for seconds, waited in waited_s]

    def is_other_model(self, baseline: Record) -> bool:
        """Return whether it computes something else on purpose, and can't win by speed alone."""
        return self.changes_model != baseline.changes_model

    @property
    def is_accepted(self) -> bool:
        """Return whether the user named a number, and no more is given up than is allowed."""
        return self.score is not None and self.score.is_accepted

    @property
    def is_refused(self) -> bool:
        """Return whether the user named a number, and more is given up than is allowed."""
        return self.score is not None and not self.score.is_accepted


def ratio_of(before: Record, after: Record, error: float) -> Ratio | None:
    """Return how many times as fast `after` is, by the rounds of both; None without any."""
    pairs = min(len(before.times_s), len(after.times_s))
    if not pairs:
        return None
    both = (before, after)
    waited_s = [(record.waited_s + [0.0] * pairs)[:pairs] for record in both]
    return paired_ratio(before.times_s[:pairs], after.times_s[:pairs], error, waited_s)


def environment(device: torch.device) -> dict[str, Any]:
    """Return the device, versions and the time of a result, of the machine that it ran on.

    On a CPU also its threads. `planned_for` names the other machine that its plans were made for,
    where there is one.
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
