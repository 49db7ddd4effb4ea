"""Train with and without a plan, with the same random state and data; compare the losses.

Other baselines, with other seeds and slightly changed weights, show how much curves usually differ.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import torch

from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.context import hidden
from speedkit_jupyter.plans.planning import together
from speedkit_jupyter.right.reference import unit
from speedkit_jupyter.rounds.comparison import Progress, Record, Shown, drained, environment
from speedkit_jupyter.rounds.runner import Runner
from speedkit_jupyter.rounds.timing import device_of
from speedkit_jupyter.search.candidates import Candidate
from speedkit_jupyter.state.replay import Replays
from speedkit_jupyter.step.step import Step, step_of
from speedkit_jupyter.step.variants import CURRENT, config_of, variant
from speedkit_jupyter.step.watching import StepFacts, Watcher, optimizers_made, watching
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError, in_a_line
from speedkit_jupyter.torchglue.confinement import patched
from speedkit_jupyter.torchglue.interrupts import interruptible_in_users_code
from speedkit_jupyter.torchglue.storage import is_in_memory

# Default number of calls in each run: enough for a wrong learning rate or weight decay to show.
STEPS = 50
# Limit on the number of other baselines; after these, the report says that the curves differ.
MOST_BASELINES = 4
# Weights of other baselines get relative noise of up to half of bf16's unit roundoff; bf16 weights
# get more. In a step without random numbers, another seed alone changes nothing.
ROUNDING = 2.0**-9
# If a step has more losses, such as one per micro-batch, their mean is compared.
MOST_LOSSES = 8
# A distance above this many times the allowed distance is not an effect of the seed.
FAR_AWAY = 10
# A distance of this share of the range of the baseline's losses is always allowed.
LEAST_SHARE = 0.01
RAN_ON = "the loss that backward() ran on, without a GradScaler's scale"
NO_TRAINING = "the step runs no backward pass: there is no training to verify"
DONE = "a later call runs no backward pass (a finished fit?): create the trainer in the step"


@dataclass(frozen=True)
class Curve:
    """A loss by step, for the baseline, the plan and other baselines; `what` names the loss.

    `distance` is the plan's root mean square distance from the baseline, `allowed` its limit, and
    `yardstick` the distance of the farthest other baseline. The `agreement` is "same", "different"
    or "worse" (the plan's loss is finite less often, or ends over `allowed` above the baseline).
    """

    what: str = RAN_ON
    baseline: list[float] = field(default_factory=list)
    planned: list[float] = field(default_factory=list)
    others: list[list[float]] = field(default_factory=list)
    distance: float = 0.0
    yardstick: float = 0.0
    allowed: float = 0.0
    agreement: str = "same"

    @property
    def other(self) -> list[float]:
        """Return the losses of the other baseline that is farthest from the baseline."""
        return _farthest(self.others, self.baseline)


def curve_of(what: str, losses: Sequence[list[float]], rounding: float) -> Curve:
    """Judge the losses of baseline, plan and other baselines; `rounding` is a relative error."""
    baseline, planned, *others = losses
    distance = _distance(planned, baseline)
    yardstick = _finite(_distance(_farthest(others, baseline), baseline))
    finite = list(filter(math.isfinite, baseline)) or [0.0]
    change, size = max(finite) - min(finite), _distance(finite, [0.0] * len(finite))
    allowed, agreement = max(2 * yardstick, LEAST_SHARE * change, rounding * size), "same"
    last = max(len(baseline) // 5, 1)
    if sum(map(math.isfinite, planned)) < min(len(planned), sum(map(math.isfinite, baseline))):
        agreement = "worse"
    elif distance > allowed:  # False for NaN, if the baseline is not finite
        above = fmean(planned[-last:]) - fmean(baseline[-last:])
        agreement = "worse" if above > allowed else "different"
    return Curve(what, baseline, planned, others, distance, yardstick, allowed, agreement)


def _distance(losses: Sequence[float], other: Sequence[float]) -> float:
    pairs = list(zip(losses, other, strict=False))
    return math.sqrt(fmean((a - b) * (a - b) for a, b in pairs)) if pairs else 0.0


def _farthest(others: Sequence[list[float]], baseline: Sequence[float]) -> list[float]:
    return max(others, key=lambda one: _finite(_distance(one, baseline)), default=[])


def _finite(distance: float) -> float:
    return distance if math.isfinite(distance) else 0.0


@dataclass
class Losses(Watcher):
    """The losses of one step, collected while the step runs.

    `ran_on` has the mean of each tensor that `backward()` ran on, divided by a GradScaler's
    `scale`; `unit` is the coarsest unit roundoff of these tensors' dtypes.
    """

    ran_on: list[float] = field(default_factory=list)
    unit: float = 0.0
    scale: float = 1.0

    def before_backward(self, tensors: Any) -> None:
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else list(tensors):
            wide = tensor.detach()
            wide = wide if wide.dtype is torch.float64 else wide.float()
            self.ran_on.append(float(wide.mean()) / self.scale)
            self.unit = max(self.unit, torch.finfo(tensor.dtype).eps / 2)


@contextmanager
def watched() -> Iterator[Losses]:
    """Yield the losses that backward passes in the block start from, without GradScaler's scale."""
    losses = Losses()

    def scaled(original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        losses.scale = float(scaler.get_scale()) if scaler.is_enabled() else 1.0
        return result

    with patched(torch.amp.GradScaler, "scale", partial(partial, scaled)), watching((), losses):
        yield losses


def curves_of(runs: Sequence[Sequence[Losses]], unit: float) -> list[Curve]:
    """Return the curves of `runs`: the baseline, the plan, and other baselines.

    Each loss has a curve. With over MOST_LOSSES losses, or a varying number, only the mean has one.
    `unit` is the larger of the unit roundoffs of plan and model.
    """
    steps = [step for run in runs for step in run]
    if not steps:
        return []
    most, *other = {len(step.ran_on) for step in steps}
    names = [f"loss {at + 1} of {most}: {RAN_ON}" for at in range(most)] if most > 1 else [RAN_ON]
    if is_mean := bool(other) or most > MOST_LOSSES:
        names = [f"the mean over each step of {RAN_ON}"]
    # One rounding has a root mean square error of 0.41 `unit`, so `unit / 2` is allowed. A loss is
    # rounded after each added term, perhaps always in one direction: 2 of its units are allowed.
    rounding = max(unit / 2, *(2 * step.unit for step in steps))
    curves = []
    for at, name in enumerate(names):
        losses = [[fmean(s.ran_on) if is_mean else s.ran_on[at] for s in run] for run in runs]
        curves.append(curve_of(name, losses, rounding))
    return curves


@dataclass(frozen=True, repr=False)
class Verification(Shown):
    """The losses of every step in `runs`: the baseline, the plan, and other baselines.

    `unit` is the larger of the unit roundoffs of plan and model. `verdict` is "same", "different",
    "worse" or "failed".
    """

    REPORT = "speedkit_jupyter.extras.verify.plugin:verification_report"

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
        """Return the verdict of the curve that agrees least, or "failed" after the plan's error."""
        found = {"failed"} if self.failure else {curve.agreement for curve in self.curves}
        return next((word for word in ("failed", "worse", "different") if word in found), "same")

    def to_dict(self) -> dict[str, Any]:
        names = ("name", "subject", "plan", "verdict", "failure", "environment")
        plain = {name: getattr(self, name) for name in names}
        return plain | {"curves": [asdict(curve) for curve in self.curves]}


class Verifier:
    """Verify a plan: drain `run()`, then read `result()`. All changes by the step are undone.

    Raises StepError for a step that can't be verified, ConfigError for an unreadable plan.
    """

    def __init__(self, step: Step, plan: Any, steps: int = STEPS, subject: str = "") -> None:
        if steps < 2:
            raise StepError(f"a curve needs 2 steps or more, not {steps}")
        step.refuse_unfit("verify")
        for kind in Replays(step.walk()).drawn:
            raise StepError(
                f"the step draws from {kind}, which can't be replayed, so that the runs would see "
                "other data: draw from an iterator that the cell names"
            )
        self.step, self.steps, self._facts = step, steps, StepFacts()
        if isinstance(plan, str):
            configs = (config_of(variant(plan), model) for model in step.models)
            self._config = next((config for config in configs if config is not None), None)
        else:
            self._config = plan
        name = plan if isinstance(plan, str) else "plan"
        self._result = Verification(name, runs=[[], []], subject=subject)

    def result(self) -> Verification:
        return self._result

    def has_results(self) -> bool:
        return any(self._result.runs[1:])

    def run(self) -> Generator[Progress, None, None]:
        """Train without the plan, then with it; if the plan ran, train other baselines."""
        step = self.step
        with hidden(*step.models), step.guarded() as guard:
            with optimizers_made(step.models) as made:
                yield from self._train("baseline", None, 0)
            self._facts = replace(self._facts, made=tuple(made))
            self._result = replace(self._result, environment=environment(device_of(step)))
            guard.state.restore()
            try:
                yield from self._train(self._result.name, self._config, 1)
            except StepError:
                raise
            except Exception as error:
                self._result = replace(self._result, failure=in_a_line(error))
            while not self._result.failure and self._needs_another():
                guard.state.restore()
                seed = len(self._result.runs)
                random.seed(seed)
                torch.manual_seed(seed)
                np.random.seed(seed)
                jitter(step.models)
                yield from self._train("another baseline", None, seed)

    def _needs_another(self) -> bool:
        """Return whether to train another baseline: at least one, more for small differences."""
        others = len(self._result.runs) - 2
        curves = [curve for curve in self._result.curves if curve.agreement != "same"]
        is_open = any(curve.distance <= FAR_AWAY * curve.allowed for curve in curves)
        return not others or (is_open and others < MOST_BASELINES)

    def _train(self, title: str, config: SpeedConfig | None, run: int) -> Iterator[Progress]:
        """Train the baseline (`run` 0), the plan (1) or another baseline; store the losses."""
        step = self.step
        contexts = [prepare(m, config, step.holders(m), self._facts.made) for m in step.models]
        runner, losses = Runner(step, contexts, Record(title), self._facts), list[Losses]()
        self._result.runs[run : run + 1] = [losses]
        if run == 1:
            self._result = self._described(runner)
        step.rewind()
        with runner.applied():
            for done in range(1, self.steps + 1):
                with watched() as loss:
                    runner.once(rewind=False)
                self._facts = runner.facts
                if not loss.ran_on:
                    raise StepError(NO_TRAINING if done == 1 else DONE)
                losses.append(loss)
                share = min((run + done / self.steps) / 3, 1.0)
                yield Progress(share, f"{title}: step {done} of {self.steps}")

    def _described(self, runner: Runner) -> Verification:
        """Return the result with the plan's changes, its name, and the larger unit roundoff.

        Raises StepError if the plan changes nothing.
        """
        plan, result = together([context.plan for context in runner.contexts]), self._result
        if not (active := plan.active_values()):
            why = "".join(f"; {d.name}: {d.reason}" for d in plan if d.declined)
            nothing = f"{result.name} changes nothing here, so there is nothing to verify"
            raise StepError(f"{nothing}{why}")
        words = Candidate(active).name
        name = words if result.name == words else f"{result.name} ({words})"
        dtypes = {parameter.dtype for m in self.step.models for parameter in m.parameters()}
        exact = [one for one in dtypes if one.is_floating_point or one.is_complex]
        own = max((torch.finfo(dtype).eps / 2 for dtype in exact), default=0.0)
        return replace(result, plan=active, name=name, unit=max(unit(runner.precision), own))


def jitter(models: Sequence[Any]) -> None:
    """Add relative noise to parameters: up to ROUNDING, or 3/4 of a coarser dtype's epsilon."""
    with torch.no_grad():
        for parameter in (p for m in models for p in m.parameters() if is_in_memory(p)):
            values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            if values.is_floating_point():
                wide = values if values.dtype is torch.float64 else values.float()
                noise = torch.rand_like(wide) * 2 - 1
                own = 0.75 * torch.finfo(values.dtype).eps  # half of epsilon could be rounded away
                noise = noise * ROUNDING if own <= ROUNDING else noise.sign() * own
                values.copy_(wide + wide * noise)


@interruptible_in_users_code
def verify(
    step: Callable[..., object],
    plan: str | SpeedConfig = CURRENT,
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    steps: int = STEPS,
) -> Verification:
    """Train with and without a plan and compare the loss curves; undo all changes by the step.

    Both runs start from the same weights, random state and data. Up to four other baselines, with
    other seeds and slightly changed weights, show how much curves usually differ.

    Args:
        step: a function that runs one training step.
        plan: the name of a variant (default: "current", the plan in force), or a config.
        model: the model or models (default: all that the step reaches).
        optimizer: the optimizers (default: all that the step reaches).
        steps: number of calls of the step in each run (default: 50).

    Returns:
        A Verification: `verdict` ("same", "different", "worse" or "failed") and `curves`.

    Raises:
        SpeedKitError: `step` can't be verified, the plan changes nothing, or an argument is wrong.

    Example::

        verify(train_step, "bf16", steps=100).verdict
    """
    steps = arguments.whole("steps", steps)
    if not isinstance(plan, SpeedConfig):
        plan = arguments.name("plan", plan)
    measured = step_of(step, model, optimizer)
    return drained(Verifier(measured, plan, steps, f"`{getattr(step, '__name__', 'step')}`"))
