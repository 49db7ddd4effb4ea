"""Training with and without a plan: the same seed, the same data, two loss curves.

A second baseline, with another seed, shows how far apart they may be.
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
from speedkit_jupyter.step.variants import config_of, variant
from speedkit_jupyter.support.exceptions import StepError, in_a_line
from speedkit_jupyter.torchglue.storage import is_in_memory

# The calls of the step in each run, unless the user says another number.
STEPS = 50
# Other baselines that are trained, at most, before a plan is said to have another curve.
MOST_BASELINES = 4
OTHER_SEED = "baseline, other seed"
NO_TRAINING = "the step runs no backward pass: there is no training to verify"
DONE = (
    "a call after the first runs no backward pass (a fit that is done?), and a curve needs several "
    "steps: make the trainer in the step, or verify one step of its loop"
)
# Where the step draws no random number, the other baselines start from weights that were rounded
# once as bf16 rounds: its unit roundoff.
ROUNDING = 2.0**-9


@dataclass(repr=False)
class Verification(Shown):
    """The losses of every step in `runs`: of the baseline, of the plan, and of other baselines.

    Attributes:
        curves: comparisons of the runs, one for each loss.
        verdict: "same", "different", "worse" or "failed"; with a score "accepted" or "other model".
        score: the accuracy that the user named, which decides then.
        failure: the error of the plan, in a line.
        subject: model and step in the user's words.
        unit: the largest relative error of one rounding, in the plan or in the model's dtypes.
        by_weights: whether the step draws no random numbers; the other baselines then start from
            weights with the noise of one rounding.
        changes_model: the switches of the plan that change the results; `notes` tell more of them.
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
        """The verdict of the score, if there is one; else of the curve that agrees least."""
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

    `plan` is a config, or a variant's name. The number of an `accuracy` decides, asked at the end
    of each run; then a step need not train, and `steps` may be 0.
    """

    def __init__(
        self,
        step: Step,
        plan: str | SpeedConfig,
        steps: int = STEPS,
        accuracy: NamedAccuracy | None = None,
        subject: str = "",
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
        self._config, self.steps = _config_of(plan, step), steps
        self._scorer = None if accuracy is None else Scorer(accuracy, step)
        self._facts = UNKNOWN
        name = plan if isinstance(plan, str) else "plan"
        self._result = Verification(name, runs=[[], []], subject=subject)

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
        """Return whether one more baseline may be as far from the first as the plan is."""
        result, others = self._result, len(self._result.runs) - 2
        is_open = result.score is not None and result.score.is_open
        is_open = is_open or any(curve.is_open for curve in result.curves)
        return not others or (is_open and others < MOST_BASELINES)

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
                is_same = title == OTHER_SEED and losses == result.runs[0][:done]
                if is_same and done == min(3, self.steps):  # so the seed changes nothing
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
        """Note the switches of the plan, and which of them change the results."""
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


def _config_of(plan: str | SpeedConfig, step: Step) -> SpeedConfig | None:
    """Return a plan as a config; None for the baseline."""
    if isinstance(plan, SpeedConfig):
        return plan
    chosen = variant(plan)
    configs = (config_of(chosen, model) for model in step.models)
    return next((config for config in configs if config is not None), None)


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
                own = 0.75 * torch.finfo(values.dtype).eps  # 3/4 to 3/2 units in the last place
                if own > ROUNDING:  # less would be rounded away
                    noise.sign_().mul_(own)
                values.copy_(wide + wide * noise)


def _own_unit(step: Step) -> float:
    """Return the unit roundoff of the coarsest dtype that the parameters have."""
    dtypes = {parameter.dtype for model in step.models for parameter in model.parameters()}
    exact = (dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex)
    return max((torch.finfo(dtype).eps / 2 for dtype in exact), default=0.0)
