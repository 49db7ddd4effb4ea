"""The verdict on whether a variant computes the same, and its errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["exact", "rounding", "other model", "wrong", "not checked"]


@dataclass(frozen=True)
class Accuracy:
    """Relative errors (norms) against the reference, next to the baseline's own.

    `explained_output` is the error of rounding to this precision alone. Of another model the errors
    say how much was given up, the loss's among them.
    """

    verdict: Verdict
    reason: str = ""
    output_error: float | None = None
    gradient_error: float | None = None
    baseline_output_error: float | None = None
    baseline_gradient_error: float | None = None
    explained_output: float | None = None
    loss_error: float | None = None
