"""What a verification found: loss curves, and whether they agree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from speedkit_jupyter.measure.checks.scores import Scored
from speedkit_jupyter.measure.results.presentable import Shown
from speedkit_jupyter.tuning.curves import Curve, of_runs
from speedkit_jupyter.tuning.losses import Losses

Outcome = Literal["same", "different", "worse", "failed", "accepted", "other model"]


@dataclass
class Runs:
    """The losses of each step: with nothing on, under the plan, and of other baselines.

    `unit` is the largest relative error of one rounding, in the plan or in the model's own dtypes.
    """

    baseline: list[Losses] = field(default_factory=list)
    planned: list[Losses] = field(default_factory=list)
    others: list[list[Losses]] = field(default_factory=list)
    unit: float = 0.0


@dataclass(repr=False)
class Verification(Shown):
    """Losses of every step: of the baseline, of the plan, and of baselines with another seed.

    `curves` compare them, the loss first. `by_weights` says that the step draws no random numbers,
    so that the other baselines start from weights with one rounding's noise. `failure` is the
    plan's, in a line. `subject` names model and step in the user's words. `changes_model` is what
    of the plan changes the results, and `notes` what is known of that. `score` is the number that
    the user has named, which decides then.
    """

    name: str
    plan: dict[str, Any] = field(default_factory=dict)
    runs: Runs = field(default_factory=Runs)
    by_weights: bool = False
    failure: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    subject: str = ""
    changes_model: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    score: Scored | None = None

    @property
    def curves(self) -> list[Curve]:
        """All that is compared, the loss first."""
        runs = self.runs
        return of_runs(runs.baseline, runs.planned, runs.others, runs.unit)

    @property
    def loss(self) -> Curve:
        """The first of them."""
        return next(iter(self.curves), Curve())

    @property
    def baseline(self) -> list[float]:
        """The loss at each step of the baseline."""
        return self.loss.baseline

    @property
    def planned(self) -> list[float]:
        """The loss at each step under the plan."""
        return self.loss.planned

    @property
    def verdict(self) -> Outcome:
        """The score's, where there is one; else that of the curve that agrees least."""
        if self.failure:
            return "failed"
        if self.score is not None:
            return "accepted" if self.score.is_accepted else "other model"
        agreements = {curve.agreement for curve in self.curves}
        outcomes: tuple[Outcome, ...] = ("worse", "different")
        return next((outcome for outcome in outcomes if outcome in agreements), "same")

    def rows(self) -> list[dict[str, Any]]:
        """One for each step of each loss that was compared."""
        return [row for curve in self.curves for row in curve.rows()]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "subject": self.subject,
            "plan": self.plan,
            "changes_model": self.changes_model,
            "notes": self.notes,
            "score": None if self.score is None else self.score.to_dict(),
            "verdict": self.verdict,
            "by_weights": self.by_weights,
            "failure": self.failure,
            "curves": [curve.to_dict() for curve in self.curves],
            "environment": self.environment,
        }
