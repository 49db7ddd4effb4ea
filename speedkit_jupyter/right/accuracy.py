"""Whether a variant computes the same: the verdict, and how far off it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["exact", "rounding", "other model", "wrong", "not checked"]


@dataclass(frozen=True)
class Accuracy:
    """Relative errors (norms) against the reference, and the baseline's own beside them.

    `explained_output` is what rounding to this precision alone does. Of another model the errors
    are what was given up, the loss's among them.
    """

    verdict: Verdict
    reason: str = ""
    output_error: float | None = None
    gradient_error: float | None = None
    baseline_output_error: float | None = None
    baseline_gradient_error: float | None = None
    explained_output: float | None = None
    loss_error: float | None = None
