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

    What is compared are `curves`, the loss first: what the step returns, where that is a
    floating-point number or a tensor of one, else what backward ran on, divided by the scale of
    the GradScaler that scaled it. `by_weights` says that the step draws no random numbers, so that
    the other baselines start from weights with one rounding's noise. `failure` is the plan's, in a
    line. `subject` says which model was trained by which step, in the user's words.
    `changes_model` is what of the plan makes another model, and `notes` what is known of it.
    `score` is the number that the user has named, which decides then.
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
    def other_seed(self) -> list[float]:
        """The loss at each step of the other baseline that lies farthest from the first."""
        return self.loss.other

    @property
    def distance(self) -> float:
        """Between the losses of plan and baseline, root mean square over the steps."""
        return self.loss.distance

    @property
    def yardstick(self) -> float:
        """Between the losses of the two baselines, root mean square over the steps."""
        return self.loss.yardstick

    @property
    def allowed(self) -> float:
        """How far the plan's losses may lie from the baseline's."""
        return self.loss.allowed

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
        curves = self.curves
        loss = curves[0] if curves else Curve()
        return {
            "name": self.name,
            "subject": self.subject,
            "plan": self.plan,
            "changes_model": self.changes_model,
            "notes": self.notes,
            "score": None if self.score is None else self.score.to_dict(),
            "verdict": self.verdict,
            "compared": loss.what,
            "distance": loss.distance,
            "yardstick": loss.yardstick,
            "allowed": loss.allowed,
            "by_weights": self.by_weights,
            "failure": self.failure,
            "baseline": loss.baseline,
            "planned": loss.planned,
            "other_seed": loss.other,
            "curves": [curve.to_dict() for curve in curves],
            "environment": self.environment,
        }
