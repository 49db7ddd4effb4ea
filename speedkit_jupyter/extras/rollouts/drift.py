"""The drift of a rollout: the distance of its states from the states in float32."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from speedkit_jupyter.extras.rollouts.programs import Program

# States are compared after about POINTS steps, enough for a curve, on the first SAMPLES of a batch.
POINTS, SAMPLES = 40, 2
# A law is fitted to the later half of the points, at least LEAST, and extrapolated up to FAR times
# the compared steps. Fitted errors count MARGIN times: a fit is no proof.
LEAST, FAR, MARGIN = 6, 10.0, 2.0


@dataclass
class Drift:
    """Relative `errors` of states against float32, of the worst sample, after these `steps`.

    `horizon` is the number of steps in the rollout.
    """

    horizon: int
    steps: list[int] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Return whether the whole horizon was compared."""
        return bool(self.steps) and self.steps[-1] >= self.horizon

    @property
    def largest(self) -> float:
        """Return the largest error over the horizon, compared or extrapolated; inf if unknown."""
        if not self.steps or not all(map(math.isfinite, self.errors)):
            return math.inf
        measured = max(self.errors)
        return measured if self.is_whole else max(measured, MARGIN * self._extrapolated())

    def _extrapolated(self) -> float:
        """Return the error at the horizon by the better fit of a power and an exponential law."""
        half = len(self.steps) // 2
        steps, errors = np.array(self.steps[half:], float), np.array(self.errors[half:])
        if not errors.any():
            return 0.0
        if len(steps) < LEAST or self.horizon > FAR * steps[-1]:
            return math.inf
        logs = np.log(np.maximum(errors, np.finfo(float).tiny))
        fits = []
        for scale in (np.log, np.asarray):
            line = np.polynomial.Polynomial.fit(scale(steps), logs, 1)
            miss = float(np.square(line(scale(steps)) - logs).sum())
            fits.append((miss, float(line(scale(float(self.horizon))))))
        return math.exp(min(min(fits)[1], 700.0))

    def to_dict(self) -> dict[str, Any]:
        largest = self.largest if math.isfinite(self.largest) else None
        return {"horizon": self.horizon, "steps": self.steps, "errors": self.errors,
                "largest": largest, "is_whole": self.is_whole}  # fmt: skip


def compared_steps(steps: int) -> list[int]:
    """Return about POINTS evenly spaced numbers from 1 to `steps`."""
    gap = max(steps // POINTS, 1)
    return sorted({1, *range(gap, steps + 1, gap), steps})


def states_at(program: Program, x: torch.Tensor, steps: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yield the states after these numbers of steps."""
    done = 0
    for step in steps:
        x, done = program.advance(x, step - done), step
        yield x


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the exact state, of the worst sample."""
    with torch.inference_mode():
        rows = max(len(exact), 1) if exact.ndim > 1 else 1
        # MPS has no float64.
        wide = torch.float32 if exact.device.type == "mps" else torch.float64
        exact, found = (one.to(wide).reshape(rows, -1) for one in (exact, found))
        missed, size = (found - exact).norm(dim=1), exact.norm(dim=1)
        return float(torch.where(missed == 0, missed, missed / size).max())
