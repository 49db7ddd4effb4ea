"""What a search found: the plan, the proof, and what was rejected with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.config import SpeedConfig
from speedkit_jupyter.context import SpeedContext, apply_speedups
from speedkit_jupyter.measure.comparison import Comparison
from speedkit_jupyter.measure.shown import Shown
from speedkit_jupyter.measure.step import Step
from speedkit_jupyter.planning import Plan, plan
from speedkit_jupyter.tuning.candidates import Candidate

if TYPE_CHECKING:
    from speedkit_jupyter.facts import Facts
    from speedkit_jupyter.hardware import Hardware


@dataclass(frozen=True)
class Stage:
    """One benchmark of the search."""

    title: str
    comparison: Comparison


@dataclass(frozen=True)
class Rejected:
    """A candidate that is not part of the plan, and why."""

    name: str
    reason: str


@dataclass(repr=False)
class Tuning(Shown):
    """The result. `winner` is empty where the answer is to leave everything as it is.

    `comparison` is the confirmation: fresh rounds of baseline and winner that took no part in
    choosing; None where the search ended before. `seconds` is how long it all took.
    """

    step: Step
    hardware: Hardware
    facts: Facts
    objective: str = "time"
    steps: int | None = None
    winner: Candidate = field(default_factory=lambda: Candidate({}))
    comparison: Comparison | None = None
    stages: list[Stage] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def helped(self) -> bool:
        """Whether there is a plan that was proven better than leaving everything as it is."""
        return bool(self.winner.values)

    @property
    def config(self) -> SpeedConfig:
        """The plan as a config: what it names and no more. All that it decides was measured."""
        if not self.helped:
            return SpeedConfig().alone()
        config = self.winner.variant().config
        assert config is not None
        return config.with_source("measured")

    @property
    def plan(self) -> Plan:
        """The decisions; each one that is active was measured."""
        return plan(self.config, self.hardware, self.facts)

    def apply(self) -> list[SpeedContext]:
        """Put the plan into force on the step's models; one context each, none if none helped."""
        if not self.helped:
            return []
        return [
            apply_speedups(model, self.config, optimizer=self.step.holders(model))[1]
            for model in self.step.models
        ]

    def parts(self) -> list[tuple[str, float]]:
        """How much faster baseline became with each part alone, by the first stage's rounds."""
        found = []
        for name, value in self.winner.values.items():
            single = Candidate({name: value}).name
            for stage in self.stages:
                record = next((r for r in stage.comparison.records if r.name == single), None)
                ratio = None if record is None else stage.comparison.ratio(record)
                if ratio is not None:
                    found.append((single, ratio.median))
                    break
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "winner": self.winner.name,
            "plan": dict(self.winner.values),
            "objective": self.objective,
            "steps": self.steps,
            "seconds": self.seconds,
            "confirmed": None if self.comparison is None else self.comparison.to_dict(),
            "stages": [{"title": s.title, **s.comparison.to_dict()} for s in self.stages],
            "rejected": [{"name": one.name, "reason": one.reason} for one in self.rejected],
        }
