"""Training with and without a plan: the same seed, the same data, two loss curves.

Other baselines, with other seeds and rounded weights, show how far apart curves are anyway.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from speedkit_jupyter.plans.applying import hidden, prepare
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.planning import together
from speedkit_jupyter.right.named_accuracy import SHARE
from speedkit_jupyter.right.reference import unit
from speedkit_jupyter.rounds.presentable import Shown
from speedkit_jupyter.rounds.record import Record, environment
from speedkit_jupyter.rounds.runner import Runner
from speedkit_jupyter.rounds.sampler import Progress
from speedkit_jupyter.rounds.timing import device_of
from speedkit_jupyter.search.candidates import Candidate
from speedkit_jupyter.state.replay import Replays
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import config_of, variant
from speedkit_jupyter.step.watching import UNKNOWN, Watcher, optimizers_made, watching
from speedkit_jupyter.support.exceptions import StepError, in_a_line
from speedkit_jupyter.torchglue.confinement import patched
from speedkit_jupyter.torchglue.storage import is_in_memory

# The calls of the step in each run, unless the user says another number: enough that a learning
# rate or a weight decay that is wrong shows in the curve.
STEPS = 50
# Other baselines that are trained, at most, before a plan is said to have another curve.
MOST_BASELINES = 4
# Their weights are rounded once as bf16 rounds, by its unit roundoff: a step may draw no random
# number.
ROUNDING = 2.0**-9
RETURNED = "the number that the step returns"
RAN_ON = "the loss that backward() ran on, without a GradScaler's scale"
NO_TRAINING = "the step runs no backward pass: there is no training to verify"
DONE = "a later call runs no backward pass (a fit that is done?): make the trainer in the step"


# --- losses and curves ---


@dataclass
class Curve:
    """One loss by step: of the baseline, of the plan, and of other baselines; `what` names it.

    `rounding` is the relative error that the precision of its last operations leaves in it.
    """

    what: str = RAN_ON
    baseline: list[float] = field(default_factory=list)
    planned: list[float] = field(default_factory=list)
    others: list[list[float]] = field(default_factory=list)
    rounding: float = 0.0

    @property
    def other(self) -> list[float]:
        """The other baseline that is farthest from the first."""
        return max(self.others, key=self._finite_distance, default=[])

    @property
    def distance(self) -> float:
        return _distance(self.planned, self.baseline)

    @property
    def yardstick(self) -> float:
        """The same of the farthest other baseline."""
        return self._finite_distance(self.other)

    @property
    def allowed(self) -> float:
        """Twice the yardstick, 1 % of the loss's change, or its rounding, whichever is most."""
        finite = list(filter(math.isfinite, self.baseline)) or [0.0]
        change, size = max(finite) - min(finite), _distance(finite, [0.0] * len(finite))
        return max(2 * self.yardstick, SHARE * change, self.rounding * size)

    @property
    def agreement(self) -> str:
        """`same`: as two seeds agree; `worse`: the plan's ends above; else `different`."""
        if all(map(math.isfinite, self.baseline)) and not all(map(math.isfinite, self.planned)):
            return "worse"
        if not self.distance > self.allowed:  # also where both are not finite
            return "same"
        last = max(len(self.baseline) // 5, 1)
        above = _mean(self.planned[-last:]) - _mean(self.baseline[-last:])
        return "worse" if above > self.allowed else "different"

    @property
    def is_open(self) -> bool:
        """Whether the plan is farther away than allowed, but another seed may explain it."""
        # Ten times as far away is no effect of the seed.
        return self.agreement != "same" and self.distance <= 10 * self.allowed

    def to_dict(self) -> dict[str, Any]:
        numbers = ("agreement", "distance", "yardstick", "allowed")
        return asdict(self) | {name: getattr(self, name) for name in numbers}

    def _finite_distance(self, losses: Sequence[float]) -> float:
        gap = _distance(losses, self.baseline)
        return gap if math.isfinite(gap) else 0.0


def _distance(losses: Sequence[float], other: Sequence[float]) -> float:
    pairs = list(zip(losses, other, strict=False))
    return math.sqrt(_mean([(a - b) * (a - b) for a, b in pairs])) if pairs else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass
class Losses(Watcher):
    """The losses of one step.

    `returned` is the number that the step returns, or None; `ran_on` has the mean of each tensor
    that a backward pass began from, divided by a GradScaler's `scale`; `unit` is the coarsest
    rounding of their dtypes.
    """

    returned: float | None = None
    ran_on: list[float] = field(default_factory=list)
    unit: float = 0.0
    scale: float = 1.0

    def before_backward(self, tensors: Any) -> None:
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else list(tensors):
            self.ran_on.append(_mean_of(tensor) / self.scale)
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
    numbers = {len(step.ran_on) for step in steps}
    most = max(numbers)
    if all(step.returned is not None for step in steps):
        names, losses = [RETURNED], lambda step: [step.returned]
    elif len(numbers) > 1 or most > 8:  # as micro-batches, which no plan moves apart
        names, losses = [f"the mean over each step of {RAN_ON}"], lambda step: [_mean(step.ran_on)]
    else:
        names = [f"loss {at + 1} of {most}: {RAN_ON}" for at in range(most)]
        names, losses = names if most > 1 else [RAN_ON], lambda step: step.ran_on
    # Of one rounding's error the root mean square is 0.41 units roundoff over all significands. A
    # loss in a low precision is rounded after each of its terms, always in the same way while it
    # hardly changes: two units.
    rounding = max(unit / 2, *(2 * step.unit for step in steps))
    curves = []
    for at, name in enumerate(names):
        baseline, planned, *others = [[losses(step)[at] for step in run] for run in runs]
        curves.append(Curve(name, baseline, planned, others, rounding))
    return curves


# --- the verification ---


@dataclass(repr=False)
class Verification(Shown):
    """The losses of every step in `runs`: of the baseline, of the plan, and of other baselines.

    Attributes:
        curves: comparisons of the runs, one for each loss.
        verdict: "same", "different", "worse" or "failed".
        unit: the largest relative error of one rounding, in the plan or in the model's dtypes.
    """

    name: str
    plan: dict[str, Any] = field(default_factory=dict)
    runs: list[list[Losses]] = field(default_factory=list)
    unit: float = 0.0
    failure: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    subject: str = ""

    @property
    def curves(self) -> list[Curve]:
        return curves_of(self.runs, self.unit)

    @property
    def loss(self) -> Curve:
        return next(iter(self.curves), Curve())

    @property
    def verdict(self) -> str:
        """The verdict of the curve that agrees least."""
        found = {"failed"} if self.failure else {curve.agreement for curve in self.curves}
        return next((word for word in ("failed", "worse", "different") if word in found), "same")

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"compared": one.what, "step": step, "baseline": b, "planned": p, "other": o}
            for one in self.curves
            for step, (b, p, o) in enumerate(zip_longest(one.baseline, one.planned, one.other), 1)
        ]

    def to_dict(self) -> dict[str, Any]:
        names = ("name", "subject", "plan", "verdict", "failure", "environment")
        plain = {name: getattr(self, name) for name in names}
        return plain | {"curves": [curve.to_dict() for curve in self.curves]}


class Verifier:
    """Drain `run()`, then read `result()`. Everything ends as it began. Raises StepError.

    `plan` is a config, or a variant's name.
    """

    def __init__(
        self, step: Step, plan: str | SpeedConfig, steps: int = STEPS, subject: str = ""
    ) -> None:
        if steps < 2:
            raise StepError(f"a curve needs 2 steps or more, not {steps}")
        if not step.models:
            raise StepError(step.why_no_model("verify"))
        for kind in Replays(step.walk()).drawn:
            raise StepError(
                f"the step draws from {kind}, which can't be replayed, so that the runs would see "
                "other data: draw from an iterator that the cell names"
            )
        self.step, self.steps, self._facts = step, steps, UNKNOWN
        self._config = plan if isinstance(plan, SpeedConfig) else None
        name = plan if isinstance(plan, str) else "plan"
        if isinstance(plan, str):
            configs = (config_of(variant(plan), model) for model in step.models)
            self._config = next((config for config in configs if config is not None), None)
        self._result = Verification(name, runs=[[], []], subject=subject)

    def result(self) -> Verification:
        return self._result

    def has_results(self) -> bool:
        return any(self._result.runs[1:])

    def run(self) -> Generator[Progress, None, None]:
        """Train three times or more from the user's state; yields after every step."""
        result, step = self._result, self.step
        with hidden(*step.models), step.guarded() as guard:
            with optimizers_made(step.models) as made:
                yield from self._train("baseline", None, 0)
            self._facts = replace(self._facts, made=tuple(made))
            result.environment = environment(device_of(step))
            guard.state.restore()
            try:
                yield from self._train(result.name, self._config, 1)
            except StepError:
                raise
            except Exception as error:
                result.failure = in_a_line(error)
            while not result.failure and self._needs_another():
                guard.state.restore()
                seed = len(result.runs)
                random.seed(seed)
                torch.manual_seed(seed)
                np.random.seed(seed)
                jitter(step.models)
                yield from self._train("another baseline", None, seed)

    def _needs_another(self) -> bool:
        """Return whether one more baseline may be as far from the first as the plan is."""
        others = len(self._result.runs) - 2
        is_open = any(curve.is_open for curve in self._result.curves)
        return not others or (is_open and others < MOST_BASELINES)

    def _train(self, title: str, config: SpeedConfig | None, run: int) -> Iterator[Progress]:
        """Train the baseline (`run` 0), the plan (1) or another baseline, with the same data."""
        step, result = self.step, self._result
        contexts = [prepare(m, config, step.holders(m), self._facts.made) for m in step.models]
        runner, losses = Runner(step, contexts, Record(title), self._facts), list[Losses]()
        result.runs[run : run + 1] = [losses]
        if run == 1:
            self._describe(runner)
        step.rewind()
        with runner.applied():
            for done in range(1, self.steps + 1):
                with watched() as loss:
                    loss.returned = number(runner.once(rewind=False))
                self._facts = runner.facts
                if not loss.ran_on:
                    raise StepError(NO_TRAINING if done == 1 else DONE)
                losses.append(loss)
                share = min((run + done / self.steps) / 3, 1.0)
                yield Progress(share, f"{title}: step {done} of {self.steps}")

    def _describe(self, runner: Runner) -> None:
        """Note switches and rounding of the plan. Raises StepError where it has no switch."""
        plan, result = together([context.plan for context in runner.contexts]), self._result
        result.plan = plan.active_values()
        if not result.plan:
            why = "".join(f"; {d.name}: {d.reason}" for d in plan if d.declined)
            nothing = f"{result.name} changes nothing here, so there is nothing to verify"
            raise StepError(f"{nothing}{why}")
        words = Candidate(result.plan).name
        result.name = words if result.name == words else f"{result.name} ({words})"
        dtypes = {parameter.dtype for m in self.step.models for parameter in m.parameters()}
        exact = [one for one in dtypes if one.is_floating_point or one.is_complex]
        own = max((torch.finfo(dtype).eps / 2 for dtype in exact), default=0.0)
        result.unit = max(unit(runner.precision), own)


def jitter(models: Sequence[Any]) -> None:
    """Add one rounding's noise to every parameter: bf16's, or its own dtype's if coarser."""
    with torch.no_grad():
        for parameter in (p for m in models for p in m.parameters() if is_in_memory(p)):
            values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            if values.is_floating_point():
                wide = values if values.dtype is torch.float64 else values.float()
                noise = torch.rand_like(wide).mul_(2).sub_(1).mul_(ROUNDING)
                own = 0.75 * torch.finfo(values.dtype).eps  # 3/4 to 3/2 units in the last place
                if own > ROUNDING:  # less would be rounded away
                    noise.sign_().mul_(own)
                values.copy_(wide + wide * noise)
