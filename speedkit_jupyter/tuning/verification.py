"""Training under a plan beside training without: the same seed, the same data, two loss curves.

How far apart they may lie is not decided by a rule: a second baseline, with another seed, is the
yardstick.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from speedkit_jupyter.config import SpeedConfig
from speedkit_jupyter.context import hidden, prepare
from speedkit_jupyter.exceptions import StepError
from speedkit_jupyter.measure.comparison import Record
from speedkit_jupyter.measure.confinement import patched
from speedkit_jupyter.measure.environment import environment
from speedkit_jupyter.measure.made_inside import made_inside
from speedkit_jupyter.measure.replays import Replays
from speedkit_jupyter.measure.runner import Runner
from speedkit_jupyter.measure.sampler import Progress
from speedkit_jupyter.measure.shown import Shown
from speedkit_jupyter.measure.step import Step
from speedkit_jupyter.tuning.candidates import Candidate

if TYPE_CHECKING:
    import torch

Outcome = Literal["same", "different", "worse", "failed"]

# A plan may lie as far from the baseline as this many times the second baseline does, or this
# share of what the loss changes by over the run, whichever is more.
YARDSTICKS, LEAST_SHARE = 2.0, 0.01
# Where no random number is drawn, the second baseline starts from weights that were rounded once
# as bf16 rounds: this relative step.
ROUNDING = 2.0**-9
# So many equal losses, and the seed is taken to change nothing.
EQUAL_STEPS = 3
SEED = 1
NO_TRAINING = "the step runs no backward pass: there is no training to verify"
DONE = (
    "a call after the first runs no backward pass (a fit that is done?), and a curve needs several "
    "steps: make the trainer in the step, or verify one step of its loop"
)


@dataclass(repr=False)
class Verification(Shown):
    """Losses by step: of the baseline, of the plan, and of a baseline with another seed.

    `by_weights` says that the step draws no random numbers, so that the other baseline starts
    from weights with one rounding's noise. `failure` is the plan's, in a line. `subject` says
    which model was trained by which step, in the user's words.
    """

    name: str
    plan: dict[str, Any] = field(default_factory=dict)
    baseline: list[float] = field(default_factory=list)
    planned: list[float] = field(default_factory=list)
    other_seed: list[float] = field(default_factory=list)
    by_weights: bool = False
    failure: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    subject: str = ""

    @property
    def distance(self) -> float:
        """Between plan and baseline, root mean square over the steps."""
        return _distance(self.planned, self.baseline)

    @property
    def yardstick(self) -> float:
        """Between the two baselines, root mean square over the steps."""
        return _distance(self.other_seed, self.baseline)

    @property
    def allowed(self) -> float:
        """How far the plan may lie from the baseline."""
        finite = [one for one in self.baseline if math.isfinite(one)]
        change = max(finite) - min(finite) if finite else 0.0
        yardstick = self.yardstick if math.isfinite(self.yardstick) else 0.0
        return max(YARDSTICKS * yardstick, LEAST_SHARE * change)

    @property
    def verdict(self) -> Outcome:
        """`same`: the curves agree as two seeds do; `worse`: the plan's ends above; else
        `different`.
        """
        if self.failure:
            return "failed"
        if _is_finite(self.baseline) and not _is_finite(self.planned):
            return "worse"
        if not self.distance > self.allowed:  # also where both are not finite
            return "same"
        last = max(len(self.baseline) // 5, 1)
        above = _mean(self.planned[-last:]) - _mean(self.baseline[-last:])
        return "worse" if above > self.allowed else "different"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "subject": self.subject,
            "plan": self.plan,
            "verdict": self.verdict,
            "distance": self.distance,
            "yardstick": self.yardstick,
            "allowed": self.allowed,
            "by_weights": self.by_weights,
            "failure": self.failure,
            "baseline": self.baseline,
            "planned": self.planned,
            "other_seed": self.other_seed,
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
        return bool(self._result.planned)

    def run(self) -> Generator[Progress, None, None]:
        """Train three times from the user's state; yields after every step."""
        __tracebackhide__ = True
        found = self._result
        with ExitStack() as stack:
            for model in self.step.models:
                stack.enter_context(hidden(model))
            start = stack.enter_context(self.step.isolated()).state
            with made_inside(self.step.models) as made:
                yield from self._train("baseline", None, found.baseline, 0)
            self.step.made = made
            found.environment = environment(self._device())
            start.restore()
            try:
                yield from self._train(found.name, self._config, found.planned, 1)
            except StepError:
                raise
            except Exception as error:
                found.failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                return
            start.restore()
            _seed(SEED)
            yield from self._train("baseline, other seed", None, found.other_seed, 2)
            if found.by_weights:
                found.other_seed.clear()
                start.restore()
                _jitter(self.step.models)
                yield from self._train("baseline, rounded weights", None, found.other_seed, 2)

    def _train(
        self, title: str, config: SpeedConfig | None, losses: list[float], number: int
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
                with _watched(runner) as seen:
                    runner.once(rewind=False)
                if not seen:
                    raise StepError(NO_TRAINING if index == 0 else DONE)
                losses.append(_mean(seen))
                share = (number + (index + 1) / self.steps) / 3
                yield Progress(share, f"{title}: step {index + 1} of {self.steps}")
                same = losses == self._result.baseline[: len(losses)]
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


@contextmanager
def _watched(runner: Runner) -> Iterator[list[float]]:
    """The losses that backward runs on within one step."""
    import torch

    seen: list[float] = []

    def watching(backward: Any) -> Callable[..., Any]:
        def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            divisor = runner.scale() if runner.scales_itself else 1.0
            seen.extend(float(one.detach().float().mean()) / divisor for one in listed)
            return backward(tensors, *args, **kwargs)

        return watched

    with patched(torch.autograd, "backward", watching):
        yield seen


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
    """One rounding's noise on every floating-point parameter."""
    import torch

    with torch.no_grad():
        for parameter in (p for model in models for p in model.parameters()):
            if parameter.is_floating_point():
                noise = torch.rand_like(parameter).mul_(2).sub_(1).mul_(ROUNDING)
                parameter.add_(parameter * noise)


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    pairs = list(zip(one, other, strict=False))
    return math.sqrt(_mean([(a - b) ** 2 for a, b in pairs])) if pairs else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _is_finite(losses: Sequence[float]) -> bool:
    return all(map(math.isfinite, losses))
