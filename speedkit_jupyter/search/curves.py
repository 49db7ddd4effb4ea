"""The losses of training steps, and whether two curves of them agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from speedkit_jupyter.right.named_accuracy import FAR, SHARE, YARDSTICKS
from speedkit_jupyter.step.watching import Watcher, watching
from speedkit_jupyter.torchglue.confinement import patched

# Of more backward passes in a step only the mean is compared.
MOST_LOSSES = 8

RETURNED = "the number that the step returns"
RAN_ON = "the loss that backward() ran on"
UNSCALED = "the loss that backward() ran on, divided by the GradScaler's scale"


@dataclass
class Curve:
    """One loss by step: of the baseline, of the plan, and of other baselines; `what` names it.

    `rounding` is the relative error that the precision of its last operations leaves in it.
    `distance` is the root mean square difference of plan and baseline over the steps, `yardstick`
    the one of the farthest `other` baseline. `allowed` is twice the yardstick, 1 % of the loss's
    change, or the error of its rounding, whichever is most.
    """

    what: str = RAN_ON
    baseline: list[float] = field(default_factory=list)
    planned: list[float] = field(default_factory=list)
    others: list[list[float]] = field(default_factory=list)
    rounding: float = 0.0

    @property
    def other(self) -> list[float]:
        return max(self.others, key=self._finite_distance, default=[])

    @property
    def distance(self) -> float:
        return _distance(self.planned, self.baseline)

    @property
    def yardstick(self) -> float:
        return self._finite_distance(self.other)

    @property
    def allowed(self) -> float:
        finite = list(filter(math.isfinite, self.baseline)) or [0.0]
        change, size = max(finite) - min(finite), _distance(finite, [0.0] * len(finite))
        return max(YARDSTICKS * self.yardstick, SHARE * change, self.rounding * size)

    @property
    def agreement(self) -> str:
        """`same`: as two seeds agree; `worse`: the plan's ends above; else `different`."""
        if all(map(math.isfinite, self.baseline)) and not all(map(math.isfinite, self.planned)):
            return "worse"
        if not self.distance > self.allowed:  # also where both are not finite
            return "same"
        above = self.end_of(self.planned) - self.end_of(self.baseline)
        return "worse" if above > self.allowed else "different"

    @property
    def last(self) -> int:
        """The number of steps at the end that are averaged."""
        return max(len(self.baseline) // 5, 1)

    def end_of(self, losses: Sequence[float]) -> float:
        return _mean(losses[-self.last :])

    @property
    def is_open(self) -> bool:
        """Whether the plan is farther away than allowed, but another seed may explain it."""
        return self.agreement != "same" and self.distance <= FAR * self.allowed

    def rows(self) -> list[dict[str, Any]]:
        runs = zip_longest(self.baseline, self.planned, self.other)
        return [
            {"compared": self.what, "step": step, "baseline": b, "planned": p, "other_seed": o}
            for step, (b, p, o) in enumerate(runs, 1)
        ]

    def to_dict(self) -> dict[str, Any]:
        numbers = ("agreement", "distance", "yardstick", "allowed")
        return asdict(self) | {name: getattr(self, name) for name in numbers}

    def _finite_distance(self, losses: Sequence[float]) -> float:
        gap = _distance(losses, self.baseline)
        return gap if math.isfinite(gap) else 0.0


@dataclass
class Losses(Watcher):
    """The losses of one step.

    `returned` is the number that the step returns, or None; `ran_on` has the mean of each tensor
    that a backward pass began from, divided by a GradScaler's `scale`; `unit` is the coarsest
    rounding of their dtypes.
    """

    returned: float | None = None
    ran_on: list[float] = field(default_factory=list)
    was_scaled: bool = False
    unit: float = 0.0
    scale: float = field(default=1.0, compare=False)

    def before_backward(self, tensors: Any) -> None:
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else list(tensors):
            self.ran_on.append(_mean_of(tensor) / self.scale)
            self.was_scaled |= self.scale != 1.0
            self.unit = max(self.unit, torch.finfo(tensor.dtype).eps / 2)


@contextmanager
def watched() -> Iterator[Losses]:
    """Note the losses that backward passes begin from, without a GradScaler's scale."""
    losses = Losses()

    def scaling(original: Any) -> Callable[..., Any]:
        def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, *args, **kwargs)
            losses.scale = float(scaler.get_scale()) if scaler.is_enabled() else 1.0
            return result

        return call

    with patched(torch.amp.GradScaler, "scale", scaling), watching((), losses):
        yield losses


def number(result: object) -> float | None:
    """Return a floating-point number or tensor of one element; None for a count or a flag."""
    if isinstance(result, torch.Tensor):
        is_number = result.numel() == 1 and result.is_floating_point()
        return _mean_of(result) if is_number else None
    return float(result) if isinstance(result, float | np.floating) else None


def _mean_of(tensor: Any) -> float:
    wide = tensor.detach()
    return float((wide if wide.dtype is torch.float64 else wide.float()).mean())


def curves_of(runs: Sequence[Sequence[Losses]], unit: float) -> list[Curve]:
    """Return the curves of baseline, plan and other baselines, in this order of `runs`.

    The loss is the number that the step returns, if it always returns one; else each loss that
    backward ran on, or their mean. `unit` is the rounding of the precision of the plan.
    """
    steps = [step for run in runs for step in run]
    if not steps:
        return []
    kind = UNSCALED if any(step.was_scaled for step in steps) else RAN_ON
    numbers = {len(step.ran_on) for step in steps}
    names = [f"loss {i + 1} of {max(numbers)}: {kind}" for i in range(max(numbers))]
    if all(step.returned is not None for step in steps):
        names, losses = [RETURNED], lambda step: [step.returned]
    elif len(numbers) > 1 or len(names) > MOST_LOSSES:
        names, losses = [f"the mean over each step of {kind}"], lambda step: [_mean(step.ran_on)]
    else:
        names, losses = names if len(names) > 1 else [kind], lambda step: step.ran_on
    # Of one rounding's error the root mean square is 0.41 units roundoff over all significands. A
    # loss in a low precision is rounded after each of its terms, always in the same way while it
    # hardly changes: two units.
    rounding = max(unit / 2, *(2 * step.unit for step in steps))
    curves = []
    for at, name in enumerate(names):
        baseline, planned, *others = [[losses(step)[at] for step in run] for run in runs]
        curves.append(Curve(name, baseline, planned, others, rounding))
    return curves


def _distance(losses: Sequence[float], other: Sequence[float]) -> float:
    """Return the root mean square difference over the steps that both have."""
    pairs = list(zip(losses, other, strict=False))
    return math.sqrt(_mean([(a - b) * (a - b) for a, b in pairs])) if pairs else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
