"""Training under a plan beside training without: the same seed, the same data, two loss curves.

A second baseline, with another seed, is the yardstick of how far apart they may lie.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from speedkit_jupyter.plans.applying import hidden, prepare
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.planning import together
from speedkit_jupyter.right.named_accuracy import NamedAccuracy, Scored
from speedkit_jupyter.right.rounding import unit
from speedkit_jupyter.rounds.presentable import Shown
from speedkit_jupyter.rounds.record import Record, environment
from speedkit_jupyter.rounds.runner import Runner
from speedkit_jupyter.rounds.sampler import Progress
from speedkit_jupyter.rounds.scorer import Scorer
from speedkit_jupyter.rounds.timeit_run import device_of
from speedkit_jupyter.search.candidates import Candidate
from speedkit_jupyter.search.curves import Curve, Losses, curves_of, number, watched
from speedkit_jupyter.state.replay import Replays
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.step.repeats import UNKNOWN, optimizers_made
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support.exceptions import StepError, in_a_line
from speedkit_jupyter.torchglue.storage import is_in_memory

OTHER_SEED = "baseline, other seed"
# After this many equal losses the seed is taken to change nothing. This many other baselines are
# trained before a plan is said to be another curve.
EQUAL_STEPS, MOST_DRAWS = 3, 4
NO_TRAINING = "the step runs no backward pass: there is no training to verify"
DONE = (
    "a call after the first runs no backward pass (a fit that is done?), and a curve needs several "
    "steps: make the trainer in the step, or verify one step of its loop"
)
# Where no random number is drawn, the second baseline starts from weights that were rounded once
# as bf16 rounds: this relative step; or, in units in the last place, from 3/4 to 3/2 of one.
ROUNDING, STEP = 2.0**-9, 0.75


@dataclass(repr=False)
class Verification(Shown):
    """Losses of every step in its `runs`: of the baseline, of the plan, and of other baselines.

    `curves` compare them, the loss first. `unit` is the largest relative error of one rounding, in
    the plan or in the model's own dtypes. `by_weights` says that the step draws no random numbers,
    so that the other baselines start from weights with one rounding's noise. `failure` is the
    plan's, in a line. `subject` names model and step in the user's words. `changes_model` is what
    of the plan changes the results, and `notes` what is known of that. `score` is the number that
    the user has named, which decides then.
    """

    name: str
    plan: dict[str, Any] = field(default_factory=dict)
    runs: list[list[Losses]] = field(default_factory=list)
    unit: float = 0.0
    by_weights: bool = False
    failure: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    subject: str = ""
    changes_model: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    score: Scored | None = None

    @property
    def curves(self) -> list[Curve]:
        return curves_of(self.runs, self.unit)

    @property
    def loss(self) -> Curve:
        return next(iter(self.curves), Curve())

    @property
    def verdict(self) -> str:
        """The score's, where there is one; else that of the curve that agrees least."""
        if self.failure:
            return "failed"
        if self.score is not None:
            return "accepted" if self.score.is_accepted else "other model"
        agreements = {curve.agreement for curve in self.curves}
        return next((word for word in ("worse", "different") if word in agreements), "same")

    def rows(self) -> list[dict[str, Any]]:
        return [row for curve in self.curves for row in curve.rows()]

    def to_dict(self) -> dict[str, Any]:
        plain = ("name", "subject", "plan", "changes_model", "notes", "verdict", "by_weights")
        return {
            **{name: getattr(self, name) for name in (*plain, "failure", "environment")},
            "score": None if self.score is None else self.score.to_dict(),
            "curves": [curve.to_dict() for curve in self.curves],
        }


class Verifier:
    """Drain `run()`, then read `result()`. Everything ends as it began. Raises StepError.

    An `accuracy` that the user names decides, asked at the end of each run; then a step need not
    train, and `steps` may be 0.
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
        self.step = step if accuracy is None else step.with_others(accuracy.function)
        for kind in Replays(self.step.walk()).drawn:
            raise StepError(
                f"the step draws from {kind}, which can't be replayed, so that the runs would see "
                "other data: draw from an iterator that the cell names"
            )
        self._config, self.steps = config, steps
        self._scorer = None if accuracy is None else Scorer(accuracy, step)
        self._facts = UNKNOWN
        self._result = Verification(name, runs=[[], []])

    def result(self) -> Verification:
        return self._result

    def has_results(self) -> bool:
        return bool(self._result.score or any(self._result.runs[1:]))

    def run(self) -> Generator[Progress, None, None]:
        """Train three times or more from the user's state; yields after every step."""
        result = self._result
        with hidden(*self.step.models), self.step.guarded() as guard:
            start = guard.state
            with optimizers_made(self.step.models) as made:
                yield from self._train("baseline", None, 0)
                if self._scorer is not None and self._scorer.before is None:
                    start.restore()  # nothing is trained, and the accuracy alone decides
                    yield from self._train("baseline", None, 0)
            self._facts = replace(self._facts, made=tuple(made))
            result.environment = environment(device_of(self.step))
            start.restore()
            try:
                yield from self._train(result.name, self._config, 1)
            except StepError:
                raise
            except Exception as error:
                result.failure = in_a_line(error)
            while self.steps and not result.failure and self._needs_another():
                yield from self._train_another(start)

    def _needs_another(self) -> bool:
        """Return whether one more baseline may lie as far from the first as the plan does."""
        result, others = self._result, len(self._result.runs) - 2
        is_open = result.score is not None and result.score.is_open
        is_open = is_open or any(curve.is_open for curve in result.curves)
        return not others or (is_open and others < MOST_DRAWS)

    def _train_another(self, start: Snapshot) -> Iterator[Progress]:
        """Train a baseline with another seed; with other weights where the seed changes nothing."""
        result, run = self._result, len(self._result.runs)
        for title, by_weights in ((OTHER_SEED, False), ("baseline, rounded weights", True)):
            if result.by_weights is by_weights:
                start.restore()
                _seed_all(run)
                if by_weights:
                    jitter(self.step.models)
                yield from self._train(title, None, run)

    def _train(self, title: str, config: SpeedConfig | None, run: int) -> Iterator[Progress]:
        """Train the baseline (`run` 0), the plan (1) or another baseline, with the same data."""
        step, result = self.step, self._result
        contexts = [prepare(m, config, step.holders(m), self._facts.made) for m in step.models]
        runner, losses = Runner(step, contexts, Record(title), self._facts), list[Losses]()
        result.runs[run : run + 1] = [losses]
        if run == 1:
            self._describe(contexts)
            result.unit = max(unit(runner.precision), _own_unit(step))
        step.rewind()
        with runner.applied():
            for done in range(1, self.steps + 1):
                with watched() as loss:
                    loss.returned = number(runner.once(rewind=False))
                self._facts = runner.facts
                if not loss.ran_on and done == 1 and self._scorer is not None:
                    self.steps = 0
                    return
                if not loss.ran_on:
                    raise StepError(NO_TRAINING if done == 1 else DONE)
                losses.append(loss)
                share = min((run + done / self.steps) / 3, 1.0)
                yield Progress(share, f"{title}: step {done} of {self.steps}")
                is_same = losses == result.runs[0][:done]
                if title == OTHER_SEED and done == min(EQUAL_STEPS, self.steps) and is_same:
                    result.by_weights = True
                    return
            if self._scorer is not None:
                self._ask(self._scorer, runner, run)
            for context in contexts if run == 1 else ():
                found = context.notes.items()
                result.notes |= {k: note for k, note in found if k in result.changes_model}

    def _ask(self, scorer: Scorer, runner: Runner, run: int) -> None:
        result, score = self._result, scorer.scored(runner)
        if run == 1:
            result.score, result.failure = score, score.failure
        elif run and result.score is not None and score.after is not None:
            result.score.others.append(score.after)

    def _describe(self, contexts: Sequence[SpeedContext]) -> None:
        """Note what the plan is, and what of it changes the results."""
        plan, result = together([context.plan for context in contexts]), self._result
        result.plan = plan.active_values()
        if not result.plan:
            why = "".join(f"; {d.name}: {d.reason}" for d in plan if d.declined)
            nothing = f"{result.name} changes nothing here, so there is nothing to verify"
            raise StepError(f"{nothing}{why}")
        words = Candidate(result.plan).name
        result.name = words if result.name == words else f"{result.name} ({words})"
        for context in contexts:
            result.changes_model |= context.plan.changes_model()


def _seed_all(seed: int) -> None:
    """Seed Python's, torch's and, where it is in use, NumPy's generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def jitter(models: Sequence[Any]) -> None:
    """Add one rounding's noise to every parameter: bf16's, or its own dtype's if coarser."""
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


def _own_unit(step: Step) -> float:
    """Return the unit roundoff of the coarsest dtype that the parameters have."""
    dtypes = {parameter.dtype for model in step.models for parameter in model.parameters()}
    exact = (dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex)
    return max((torch.finfo(dtype).eps / 2 for dtype in exact), default=0.0)
