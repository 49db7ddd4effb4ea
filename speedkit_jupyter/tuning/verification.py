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

from speedkit_jupyter.measure.checks.rounding import unit
from speedkit_jupyter.measure.checks.scorer import Scorer
from speedkit_jupyter.measure.results.presentable import Shown
from speedkit_jupyter.measure.results.record import Record, environment
from speedkit_jupyter.measure.rounds.runner import Runner
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.subject.named_accuracy import NamedAccuracy, Score, Scored
from speedkit_jupyter.measure.subject.repeats import optimizers_made
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.undo.replay import Replays
from speedkit_jupyter.measure.undo.snapshot import Snapshot
from speedkit_jupyter.plans.applying import hidden, prepare
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.planning import Plan, together
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.storage import is_in_memory
from speedkit_jupyter.tuning.candidates import Candidate
from speedkit_jupyter.tuning.curves import Curve, Losses, of_runs, watched
from speedkit_jupyter.tuning.curves import number as number_of

if TYPE_CHECKING:
    import torch

# So many equal losses, and the seed is taken to change nothing.
EQUAL_STEPS = 3
OTHER_SEED = "baseline, other seed"
# So many other baselines are trained before a plan is said to be another curve.
MOST_DRAWS = 4
NO_TRAINING = "the step runs no backward pass: there is no training to verify"
DONE = (
    "a call after the first runs no backward pass (a fit that is done?), and a curve needs several "
    "steps: make the trainer in the step, or verify one step of its loop"
)
# Where no random number is drawn, the second baseline starts from weights that were rounded once
# as bf16 rounds: this relative step.
ROUNDING = 2.0**-9
# In units in the last place: from 3/4 to 3/2 of one, which rounds to one, up or down.
STEP = 0.75

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

    `curves` compare them, the loss first. `by_weights` says that the step draws no random numbers,
    so that the other baselines start from weights with one rounding's noise. `failure` is the
    plan's, in a line. `subject` names model and step in the user's words. `changes_model` is what
    of the plan changes the results, and `notes` what is known of that. `score` is the number that
    the user has named, which decides then.
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
        return {
            "name": self.name,
            "subject": self.subject,
            "plan": self.plan,
            "changes_model": self.changes_model,
            "notes": self.notes,
            "score": None if self.score is None else self.score.to_dict(),
            "verdict": self.verdict,
            "by_weights": self.by_weights,
            "failure": self.failure,
            "curves": [curve.to_dict() for curve in self.curves],
            "environment": self.environment,
        }


class Verifier:
    """Drain `run()`, then read `result()`. Everything ends as it began. Raises StepError.

    With an `accuracy` that the user names it decides, asked at the end of each run; a step that
    does not train is nothing to compare then, and neither are 0 `steps`.
    """

    def __init__(
        self,
        step: Step,
        name: str,
        config: SpeedConfig | None,
        steps: int = 50,
        accuracy: NamedAccuracy | None = None,
    ) -> None:
        if steps < 2 and (steps or accuracy is None):
            raise StepError(f"a curve needs 2 steps or more, not {steps}")
        if not step.models:
            raise StepError(step.why_no_model("verify"))
        every = step if accuracy is None else step.with_others(accuracy.function)
        if kind := _hidden_iterator(every):
            raise StepError(
                f"the step draws from {kind}, which can't be replayed, so that the runs would see "
                "other data: draw from an iterator that the cell names"
            )
        self._scorer = None if accuracy is None else Scorer(accuracy, step)
        self._before: Score | None = None
        self.step, self._config, self.steps = every, config, steps
        self._result = Verification(name)

    def result(self) -> Verification:
        """What is known so far."""
        return self._result

    def has_results(self) -> bool:
        """Whether there is anything to show already."""
        return bool(self._result.runs.planned or self._result.score)

    def run(self) -> Generator[Progress, None, None]:
        """Train three times from the user's state, or more where the plan lies far from the
        baseline; yields after every step.
        """
        __tracebackhide__ = True
        result, runs = self._result, self._result.runs
        with ExitStack() as stack:
            for model in self.step.models:
                stack.enter_context(hidden(model))
            start = stack.enter_context(self.step.guarded()).state
            with optimizers_made(self.step.models) as made:
                yield from self._train("baseline", None, runs.baseline, 0)
                if self._scorer is not None and self._before is None:
                    start.restore()  # nothing is trained, and the accuracy alone decides
                    yield from self._train("baseline", None, runs.baseline, 0)
            self.step.made = made
            result.environment = environment(self._device())
            start.restore()
            try:
                yield from self._train(result.name, self._config, runs.planned, 1)
            except StepError:
                raise
            except Exception as error:
                result.failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                return
            if not self.steps or result.failure:
                return
            while len(runs.others) < MOST_DRAWS and (not runs.others or self._is_open()):
                yield from self._train_another(start)

    def _is_open(self) -> bool:
        """Whether one more baseline may lie as far from the first as the plan does."""
        result = self._result
        is_open = result.score is not None and result.score.is_open
        return is_open or any(curve.is_open for curve in result.curves)

    def _train_another(self, start: Snapshot) -> Iterator[Progress]:
        """A baseline with another seed, or from other weights where the seed changes nothing."""
        __tracebackhide__ = True
        result, baselines = self._result, self._result.runs.others
        number = len(baselines) + 2
        baselines.append([])
        if not result.by_weights:
            start.restore()
            seed_all(number)
            yield from self._train(OTHER_SEED, None, baselines[-1], number)
        if result.by_weights:
            baselines[-1].clear()
            start.restore()
            seed_all(number)
            jitter(self.step.models)
            yield from self._train("baseline, rounded weights", None, baselines[-1], number)

    def _train(
        self, title: str, config: SpeedConfig | None, losses: list[Losses], number: int
    ) -> Iterator[Progress]:
        """Fill `losses`. The data of a step comes anew, the same in every run."""
        __tracebackhide__ = True
        step = self.step
        contexts = [prepare(m, config, step.holders(m), step.made) for m in step.models]
        runner = Runner(step, contexts, Record(title))
        if number == 1:
            self._name_plan(together([context.plan for context in contexts]))
            for context in contexts:
                self._result.changes_model |= context.plan.changes_model()
            self._result.runs.unit = max(unit(runner.precision), own_unit(step.models))
        step.rewind()
        with runner.applied():
            for index in range(self.steps):
                with watched() as loss:
                    loss.returned = number_of(runner.once(rewind=False))
                if not loss.ran_on and index == 0 and self._scorer is not None:
                    self.steps = 0
                    return
                if not loss.ran_on:
                    raise StepError(NO_TRAINING if index == 0 else DONE)
                losses.append(loss)
                if number == 1:
                    self._note(contexts)
                share = min((number + (index + 1) / self.steps) / 3, 1.0)
                yield Progress(share, f"{title}: step {index + 1} of {self.steps}")
                same = losses == self._result.runs.baseline[: len(losses)]
                if title == OTHER_SEED and len(losses) == min(EQUAL_STEPS, self.steps) and same:
                    self._result.by_weights = True
                    return
            if self._scorer is not None:
                self._ask(self._scorer, runner, number)
                self._note(contexts if number == 1 else ())

    def _ask(self, scorer: Scorer, runner: Runner, number: int) -> None:
        """The accuracy that the user names, at the end of a run."""
        result = self._result
        if self._before is None:
            self._before = scorer.before(runner)
        elif number == 1:
            result.score = scorer.after(runner, self._before)
            result.failure = result.score.failure
        elif result.score is not None:
            other = scorer.after(runner, self._before).after
            result.score.others.extend([] if other is None else [other.value])

    def _note(self, contexts: Sequence[SpeedContext]) -> None:
        """What a plan that makes another model has found to change."""
        for context in contexts:
            notes = {name: note for name, note in context.notes.items()
                     if name in self._result.changes_model}  # fmt: skip
            self._result.notes |= notes

    def _name_plan(self, plan: Plan) -> None:
        result, values = self._result, plan.active_values()
        if not values:
            why = "; ".join(["", *(f"{d.name}: {d.reason}" for d in plan if d.declined)])
            raise StepError(
                f"{result.name} changes nothing here, so there is nothing to verify{why}"
            )
        result.plan, words = values, Candidate(values).name
        result.name = words if result.name == words else f"{result.name} ({words})"

    def _device(self) -> torch.device:
        import torch

        parameter = next(self.step.models[0].parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device


def _hidden_iterator(step: Step) -> str:
    """The kind of an iterator that the step reaches and that nobody can draw from twice."""
    return next(iter(Replays(step.walk()).drawn), "")


def seed_all(seed: int) -> None:
    """Python's, torch's and, where it is in use, NumPy's generators."""
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def jitter(models: Sequence[torch.nn.Module]) -> None:
    """One rounding's noise on every parameter: bf16's, or a step of its own dtype where that is
    coarser.
    """
    import torch

    with torch.no_grad():
        for parameter in (p for m in models for p in m.parameters() if is_in_memory(p)):
            values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            if values.is_floating_point():
                wide = values if values.dtype is torch.float64 else values.float()
                noise = torch.rand_like(wide).mul_(2).sub_(1).mul_(ROUNDING)
                own = STEP * torch.finfo(values.dtype).eps
                if own > ROUNDING:  # less would be rounded away
                    noise.sign_().mul_(own)
                values.copy_(wide + wide * noise)


def own_unit(models: Sequence[torch.nn.Module]) -> float:
    """Of the coarsest dtype that the parameters have."""
    import torch

    dtypes = {parameter.dtype for model in models for parameter in model.parameters()}
    exact = (dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex)
    return max((torch.finfo(dtype).eps / 2 for dtype in exact), default=0.0)
