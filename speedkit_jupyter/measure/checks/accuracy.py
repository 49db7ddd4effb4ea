"""Whether a variant computes the same: the verdict, and how far off it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["exact", "rounding", "other model", "wrong", "not checked"]


@dataclass(frozen=True)
class Accuracy:
    """Relative errors (norms) against the reference, and the baseline's own beside them.

    `explained_output` and `explained_gradient` are what rounding to this precision alone does;
    `doubtful` is what was seen to be off, and may be the net or the plan. Of another model the
    errors are what was given up, the loss's among them.
    """

    verdict: Verdict
    reason: str = ""
    output_error: float | None = None
    gradient_error: float | None = None
    gradient_cosine: float | None = None
    baseline_output_error: float | None = None
    baseline_gradient_error: float | None = None
    explained_output: float | None = None
    explained_gradient: float | None = None
    doubtful: bool = False
    loss_error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def is_right(accuracy: Accuracy | None) -> bool:
    """Whether it was checked, and computes the same."""
    return accuracy is not None and accuracy.verdict in ("exact", "rounding")


def stands(accuracy: Accuracy) -> bool:
    """Whether it was checked, and nothing is wrong with it, be it another model."""
    return is_right(accuracy) or accuracy.verdict == "other model"


def is_finite(accuracy: Accuracy) -> bool:
    """Whether what was compared is numbers, of the shapes that were expected."""
    values = (accuracy.output_error, accuracy.gradient_error)
    return None not in values
