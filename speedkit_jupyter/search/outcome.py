"""The result of a search, and the memory of the results in this process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field
from typing import Any, cast

import torch

from speedkit_jupyter.plans.applying import applied_to, apply_speedups
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.naming import assign, name_of
from speedkit_jupyter.plans.registry import CHANGES
from speedkit_jupyter.rounds.budget import LONGER_BUDGET
from speedkit_jupyter.rounds.comparison import Comparison, Shown
from speedkit_jupyter.rounds.statistics import Ratio
from speedkit_jupyter.search import thresholds
from speedkit_jupyter.search.candidates import BASELINE, Candidate
from speedkit_jupyter.search.races import parts_of
from speedkit_jupyter.search.tried_plans import Stage, TimedPlan, TriedPlans
from speedkit_jupyter.step.reachable import holding
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.database import Kept
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.lookup import by_expression, notebook
from speedkit_jupyter.support.weak import Alive, Listeners
from speedkit_jupyter.support.wrappers import unwrapped

INTERRUPTED = "interrupted"


@dataclass(repr=False)
class Tuning(Shown):
    """The result of a search: a proven plan (the `winner`), a plan that is `likely`, or neither.

    `comparison` is the winner's proof; it also times rivals, and plans that lack one part. `ratio`
    is the winner's speed-up in any process, unless `where` is " in this process". `unclear` says
    why there is no answer. `busy` describes other programs' load. `most` is the largest speed-up
    that a plan may have. `learned` is set if an earlier search stored the winner.
    """

    REPORT = "speedkit_jupyter.report.tuning_report:tuning_report"

    step: InitVar[Step]
    kept: tuple[str, ...] = ()
    tried: TriedPlans = field(default_factory=TriedPlans)
    winner: Candidate = BASELINE
    comparison: Comparison | None = None
    ratio: Ratio | None = None
    where: str = ""
    likely: str = ""
    unclear: str = ""
    learned: Kept | None = None
    is_stored: bool = False
    notes: list[str] = field(default_factory=list)
    busy: str = ""
    most: float = 0.0
    seconds: float = 0.0
    compiling_s: float = 0.0

    def __post_init__(self, step: Step) -> None:
        names = {name_of(notebook(), model, "") for model in step.models}
        in_order = (word for word in by_expression(notebook(), torch.nn.Module) if word in names)
        self.named = () if "" in names else tuple(in_order)  # the models' expressions
        self.models = Alive(step.models)
        self._number = len(step.models)
        self._optimizers = Alive(step.optimizers)
        self.is_newer = True  # True until a plan is applied to one of the models

    def take(self, plan: Candidate, comparison: Comparison) -> None:
        """Set the winner, its proof and its speed-up, which may hold only in this process."""
        record = TimedPlan.of(comparison, plan).record
        here, anywhere = comparison.ratio(record), comparison.in_any_process(record)
        is_only_here = here and anywhere and here.verdict == "faster" != anywhere.verdict
        self.winner, self.comparison = plan, comparison
        self.ratio = here if is_only_here else anywhere
        self.where = " in this process" if is_only_here else ""
        self.tried.reasons.pop(plan.name, None)

    def conclude(self, why: str, seconds: float, compiling_s: float = 0.0) -> None:
        """Set times, `most` and `busy`; without a winner, also set `likely` and `unclear`.

        `why` is the reason for a missing answer. `unclear` stays empty if clearly no plan helps.
        """
        self.seconds, self.compiling_s = seconds, compiling_s
        self.most = max((row.range[1] for row in self.tried.rows() if row.ratio.pairs), default=0.0)
        rounds = (self.comparison, *(stage.comparison for stage in reversed(self.stages)))
        self.busy = next((one.busy for one in rounds if one and one.busy), "")
        if self.helped:
            return
        told, best = list[str](), self.tried.best()
        if best is not None and best.is_likely:
            self.likely = best.name
            told = [best.told("probably about "), why, LONGER_BUDGET]
        elif best is not None and best.above_limit:
            told = [best.told(), best.above_limit]
        elif why or self.most >= thresholds.LEAST_WORTH_FINDING:
            told = [f"{why} before anything helped" if why == INTERRUPTED else why]
            told += [
                f"best seen: {best.told()}" if best and best.range[1] > 1 else "",
                LONGER_BUDGET,
            ]
        self.unclear = "; ".join(filter(None, told))

    @property
    def stages(self) -> list[Stage]:
        return self.tried.stages

    @property
    def rejected(self) -> dict[str, str]:
        """Return the reasons against plans other than the winner, by plan name."""
        return self.tried.reasons

    @property
    def helped(self) -> bool:
        """Return whether a plan was proven faster than the baseline."""
        return bool(self.winner.values)

    confirmed = helped

    @property
    def is_settled(self) -> bool:
        """Return whether the search has ended with an answer: a plan is proven, or none helps."""
        return self.helped or bool(self.seconds and not self.unclear)

    @property
    def why_left(self) -> str:
        return "the search could not decide" if self.unclear else "nothing was proven faster"

    @property
    def proof(self) -> str:
        """Return the plan and its proven speed-up as text; empty without a proof."""
        told = f"{self.winner.name} is {self.ratio} as fast as {BASELINE.name}{self.where}"
        return told if self.helped else ""

    @property
    def line(self) -> str:
        return f"`%speedkit apply {','.join(self.named)}".rstrip() + "`"

    @property
    def config(self) -> SpeedConfig:
        """Return the winner's config; without a winner, a config that changes nothing."""
        if not self.helped:
            return SpeedConfig().alone(f"left as it is: {self.why_left}")
        why = f"measured: {self.winner.name} {self.ratio}{self.where}"
        return self.winner.config.with_source("measured", why)

    @property
    def likely_config(self) -> SpeedConfig | None:
        """Return the likely plan as a config, marked as not proven; None without a likely plan."""
        if not self.likely:
            return None
        told = self.unclear.partition("; ")[0]
        config = self.tried.plans[self.likely].config
        return config.with_source("measured", f"likely, not proven: {told}")

    def is_of(self, models: Iterable[Any]) -> bool:
        """Return whether the search was for exactly these models."""
        return set(map(id, models)) == set(map(id, self.models))

    def apply(self, likely: bool = False) -> list[SpeedContext]:
        """Apply the plan to the step's models.

        In a notebook, the contexts are assigned to variables: `ctx`, or longer names if `ctx` is in
        use. If no plan helps, plans in force on the models are undone. If the search is undecided,
        plans in force stay, and a message says so.

        Args:
            likely: If True and no plan is proven, apply the `likely` plan, if there is one.

        Returns:
            One SpeedContext for each model; an empty list if nothing is applied.

        Raises:
            SpeedKitError: one of the models was deleted, or the plan can't be applied.
        """
        contexts, names = self.put_in_force(likely), notebook()
        for context in contexts:
            if names is not None:
                assign(names, name_of(names, context.model), context)
        return contexts

    def put_in_force(self, likely: bool = False) -> list[SpeedContext]:
        """Apply the plan like `apply()`, but assign no variables; return the contexts."""
        models = list(self.models)
        config = self.likely_config if likely and not self.helped else self.config
        if config is not None and (self.helped or likely):
            if len(models) < self._number:
                raise SpeedKitError("this search's model is gone: search again with the new model")
            if not self.helped:
                _say(f"likely, not proven: {self.unclear}")
            return [
                apply_speedups(model, config, optimizer=holding(self._optimizers, model))[1]
                for model in models
            ]
        if self.unclear:
            hint = f"; apply(likely=True) applies {self.likely}" if self.likely else ""
            _say(f"{self.why_left}, so nothing is applied{hint}")
            return []
        for model in models:
            while (context := applied_to(model)) is not None:
                context.restore()
        return []

    def parts(self) -> list[tuple[str, Ratio]]:
        """Return each measured optimization of the winner, with the speed-up that it adds."""
        found = parts_of(self.winner, self.comparison) if self.comparison else []
        return [(part.word, part.ratio) for part in found]

    def to_dict(self) -> dict[str, Any]:
        plain = ("seconds", "compiling_s", "confirmed", "likely", "unclear")
        return {
            "winner": self.winner.name,
            "plan": dict(self.winner.values),
            **{name: getattr(self, name) for name in plain},
            "kept": list(self.kept),
            "parts": [{"part": word, **ratio.to_dict()} for word, ratio in self.parts()],
            "learned_at": None if self.learned is None else self.learned.saved_at.isoformat(),
            "comparison": None if self.comparison is None else self.comparison.to_dict(),
            "notes": list(self.notes),
            "stages": [{"title": s.title, **s.comparison.to_dict()} for s in self.stages],
            "rejected": [{"name": name, "reason": why} for name, why in self.rejected.items()],
        }


def _say(line: str) -> None:
    """Show a line as a warning; in notebooks, where warnings name IPython's files, as output."""
    (messages.warn if notebook() is None else messages.important)(line)


class SearchMemory:
    """The results of this process's settled searches for living models, the newest last.

    `newest` is the last result, settled or not. `listeners` are called after each settled search.
    """

    def __init__(self) -> None:
        self.listeners = Listeners()
        self.forget()
        CHANGES.add(self._applied_or_restored)

    def forget(self) -> None:
        self._answers, self.newest = list[Tuning](), cast("Tuning | None", None)

    def add(self, tuning: Tuning) -> None:
        """Store a result as `newest`; if settled, also for its models, and call the listeners."""
        self.newest = tuning
        if tuning.is_settled:
            self._answers = [one for one in self._answers if one.models] + [tuning]
            self.listeners.tell()

    def likely_config(self, models: Iterable[Any]) -> SpeedConfig | None:
        """Return the newest search's likely plan if that search was for these models; else None."""
        found = self.newest
        return found.likely_config if found is not None and found.is_of(models) else None

    def of(self, model: torch.nn.Module | None) -> Tuning | None:
        """Return the result of the newest settled search for this model; None without one."""
        whole = None if model is None else unwrapped(model)
        for tuning in reversed(self._answers):
            if any(unwrapped(known) is whole for known in tuning.models):
                return tuning
        return None

    def _applied_or_restored(self, model: torch.nn.Module | None) -> None:
        found = self.of(model)
        if found and model is not None and applied_to(model) is not None:
            found.is_newer = False


# A global, because results of searches belong to the process, like plans and flags.
MEMORY = SearchMemory()
