"""Training under a plan beside training without: the same seed, the same data, two loss curves.

How far apart they may lie is not decided by a rule: a second baseline, with another seed, is the
yardstick.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from speedkit_jupyter.config import SpeedConfig
from speedkit_jupyter.context import hidden, prepare
from speedkit_jupyter.exceptions import StepError
from speedkit_jupyter.measure.comparison import Record
from speedkit_jupyter.measure.environment import environment
from speedkit_jupyter.measure.made_inside import made_inside
from speedkit_jupyter.measure.replays import Replays
from speedkit_jupyter.measure.runner import Runner
from speedkit_jupyter.measure.sampler import Progress
from speedkit_jupyter.measure.shown import Shown
from speedkit_jupyter.measure.step import Step
from speedkit_jupyter.tuning.candidates import Candidate
from speedkit_jupyter.tuning.curves import Curve, of_runs
from speedkit_jupyter.tuning.losses import Losses, watched
from speedkit_jupyter.tuning.losses import number as number_of

if TYPE_CHECKING:
    import torch

Outcome = Literal["same", "different", "worse", "failed"]

# Where no random number is drawn, the second baseline starts from weights that were rounded once
# as bf16 rounds: this relative step.
ROUNDING = 2.0**-9
# In units in the last place: from 3/4 to 3/2 of one, which rounds to one, up or down.
STEP = 0.75
# So many equal losses, and the seed is taken to change nothing.
EQUAL_STEPS = 3
SEED = 1
NO_TRAINING = "the step runs no backward pass: there is no training to verify"
DONE = (
    "a call after the first runs no backward pass (a fit that is done?), and a curve needs several "
    "steps: make the trainer in the step, or verify one step of its loop"
)


@dataclass
class Runs:
    """The losses of each step: with nothing on, under the plan, and of other baselines."""

    baseline: list[Losses] = field(default_factory=list)
    planned: list[Losses] = field(default_factory=list)
    others: list[list[Losses]] = field(default_factory=list)


@dataclass(repr=False)
class Verification(Shown):
    """Losses of every step: of the baseline, of the plan, and of baselines with another seed.

    What is compared are `curves`, the loss first: what the step returns, where that is a
    floating-point number or a tensor of one, else what backward ran on, divided by the scale of
    the GradScaler that scaled it. `by_weights` says that the step draws no random numbers, so that
    the other baselines start from weights with one rounding's noise. `failure` is the plan's, in a
    line. `subject` says which model was trained by which step, in the user's words.
    """

    name: str
    plan: dict[str, Any] = field(default_factory=dict)
    runs: Runs = field(default_factory=Runs)
    by_weights: bool = False
    failure: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    subject: str = ""

    @property
    def curves(self) -> list[Curve]:
        """All that is compared, the loss first."""
        return of_runs(self.runs.baseline, self.runs.planned, self.runs.others)

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
        """That of the curve that agrees least."""
        if self.failure:
            return "failed"
        found = {curve.agreement for curve in self.curves}
        outcomes: tuple[Outcome, ...] = ("worse", "different")
        return next((one for one in outcomes if one in found), "same")

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        curves = self.curves
        loss = curves[0] if curves else Curve()
        return {
            "name": self.name,
            "subject": self.subject,
            "plan": self.plan,
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


class Verifier:
    """Drain `run()`, then read `result()`. Everything ends as it began. Raises StepError."""

    def __init__(self, step: Step, name: str, config: SpeedConfig | None, steps: int = 50) -> None:
        if steps < 2:
            raise StepError(f"a curve needs 2 steps or more, not {steps}")
        if not step.models:
            raise StepError("no model is used in this step, so there is nothing to verify")
        if kind := _hidden_iterator(step):
            raise StepError(
                f"the step draws from {kind}, which can't be replayed, so that the runs would see "
                "other data: draw from an iterator that the cell names"
            )
        self.step, self._config, self.steps = step, config, steps
        self._result = Verification(name)

    def result(self) -> Verification:
        """What is known so far."""
        return self._result

    def has_results(self) -> bool:
        """Whether there is anything to show already."""
        return bool(self._result.runs.planned)

    def run(self) -> Generator[Progress, None, None]:
        """Train three times from the user's state; yields after every step."""
        __tracebackhide__ = True
        found, runs = self._result, self._result.runs
        with ExitStack() as stack:
            for model in self.step.models:
                stack.enter_context(hidden(model))
            start = stack.enter_context(self.step.isolated()).state
            with made_inside(self.step.models) as made:
                yield from self._train("baseline", None, runs.baseline, 0)
            self.step.made = made
            found.environment = environment(self._device())
            start.restore()
            try:
                yield from self._train(found.name, self._config, runs.planned, 1)
            except StepError:
                raise
            except Exception as error:
                found.failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                return
            start.restore()
            _seed(SEED)
            runs.others.append([])
            yield from self._train("baseline, other seed", None, runs.others[-1], 2)
            if found.by_weights:
                runs.others[-1].clear()
                start.restore()
                _jitter(self.step.models)
                yield from self._train("baseline, rounded weights", None, runs.others[-1], 2)

    def _train(
        self, title: str, config: SpeedConfig | None, losses: list[Losses], number: int
    ) -> Iterator[Progress]:
        """Fill `losses`. The data of a step comes anew, the same in every run."""
        __tracebackhide__ = True
        step = self.step
        contexts = [prepare(m, config, step.holders(m), step.made) for m in step.models]
        runner = Runner(step, contexts, Record(title))
        if number == 1:
            self._name_plan(contexts[0].plan.active_values())
        step.rewind()
        with runner.applied():
            for index in range(self.steps):
                with watched() as seen:
                    seen.returned = number_of(runner.once(rewind=False))
                if not seen.ran_on:
                    raise StepError(NO_TRAINING if index == 0 else DONE)
                losses.append(seen)
                share = (number + (index + 1) / self.steps) / 3
                yield Progress(share, f"{title}: step {index + 1} of {self.steps}")
                same = losses == self._result.runs.baseline[: len(losses)]
                if title == "baseline, other seed" and len(losses) == EQUAL_STEPS and same:
                    self._result.by_weights = True
                    return

    def _name_plan(self, values: dict[str, Any]) -> None:
        found = self._result
        if not values:
            raise StepError(f"{found.name} changes nothing here, so there is nothing to verify")
        found.plan, words = values, Candidate(values).name
        found.name = words if found.name == words else f"{found.name} ({words})"

    def _device(self) -> torch.device:
        import torch

        parameter = next(self.step.models[0].parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device


def _hidden_iterator(step: Step) -> str:
    """The kind of an iterator that the step reaches and that nobody can draw from twice."""
    return next(iter(Replays(step.walk()).drawn), "")


def _seed(seed: int) -> None:
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _jitter(models: Sequence[torch.nn.Module]) -> None:
    """One rounding's noise on every parameter: bf16's, or a step of its own dtype where that is
    coarser.
    """
    import torch

    with torch.no_grad():
        for parameter in (p for model in models for p in model.parameters()):
            values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            if values.is_floating_point():
                wide = values if values.dtype is torch.float64 else values.float()
                noise = torch.rand_like(wide).mul_(2).sub_(1).mul_(ROUNDING)
                own = STEP * torch.finfo(values.dtype).eps
                if own > ROUNDING:  # less would be rounded away
                    noise.sign_().mul_(own)
                values.copy_(wide + wide * noise)
