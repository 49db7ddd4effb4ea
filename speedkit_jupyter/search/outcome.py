"""The result of a search: the plan, its proof, and why other plans lost; and the newest results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch

from speedkit_jupyter.plans.applying import applied_to, apply_speedups
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.context import CHANGES, SpeedContext
from speedkit_jupyter.plans.naming import keep, name_of
from speedkit_jupyter.rounds.budget import LONGER
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.presentable import Shown
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.rounds.statistics import Ratio
from speedkit_jupyter.search.candidates import BASELINE, Candidate
from speedkit_jupyter.search.knowledge import SearchState, Stage
from speedkit_jupyter.search.objective import LIKELY, PlanPart, parts_of, row_of
from speedkit_jupyter.step.discovery import holding
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.database import Kept
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.lookup import notebook
from speedkit_jupyter.support.weak import Alive, Listeners
from speedkit_jupyter.support.wrappers import each_once, unwrapped

INTERRUPTED = "interrupted"


@dataclass(repr=False)
class Tuning(Shown):
    """The result of a search: a proven plan, the `winner`; one that is `likely`; or neither, where
    the answer is to leave everything as it is.

    `comparison` is the proof, in fresh rounds: of baseline, the winner, and the winner without each
    of its parts; `parts_found` has the gain of each part. Without a winner `unclear` says why the
    search could not tell; it is empty where nothing helps. `kept` are the optimizations to leave as
    they are, `named` the notebook's names for the models, `learned` the plan that was known before.
    `to_apply` says that the caller applies a proven plan. A result keeps no model alive.
    """

    step: InitVar[Step]
    kept: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    to_apply: bool = False
    known: SearchState = field(default_factory=SearchState)
    winner: Candidate = BASELINE
    comparison: Comparison | None = None
    parts_found: list[PlanPart] = field(default_factory=list)
    likely: str = ""
    unclear: str = ""
    learned: Kept | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    compiling_s: float = 0.0

    def __post_init__(self, step: Step) -> None:
        self.models = Alive(step.models)
        self._number = len(step.models)
        self._optimizers = Alive(step.optimizers)
        self.is_newer = True  # until a plan is applied to one of the models

    def take(self, plan: Candidate, comparison: Comparison) -> None:
        self.winner, self.comparison = plan, comparison
        self.parts_found = parts_of(plan, comparison)
        self.known.reasons.pop(plan.name, None)

    def conclude(self, why: str, seconds: float) -> None:
        """Note the likely plan if none is proven, or why the search found no answer.

        `why` is the reason why no more is known. If it is empty and no plan is likely, none helps.
        """
        self.seconds = seconds
        if self.helped:
            return
        self.learned, told, best = None, list[str](), self.known.best()
        if best is not None and best.is_likely:
            self.likely = best.name
            told = [best.told("probably about "), why, LONGER]
        elif why or self.most >= LIKELY:
            told = [f"{why} before anything helped" if why == INTERRUPTED else why]
            told += [f"best seen: {best.told()}" if best else "", LONGER]
        self.unclear = "; ".join(filter(None, told))
        if self.to_apply:
            self.notes.append(f"Nothing was applied: {self.why_left}")

    @property
    def busy(self) -> str:
        """The line about the last rounds that other programs delayed; empty if hardly any."""
        rounds = (self.comparison, *(stage.comparison for stage in reversed(self.stages)))
        return next((one.busy for one in rounds if one and one.busy), "")

    @property
    def most(self) -> float:
        """The highest speed-up that a timed plan may have, by its interval; 0 without one."""
        return max((row.range[1] for row in self.known.rows() if row.ratio.pairs), default=0.0)

    @property
    def stages(self) -> list[Stage]:
        return self.known.stages

    @property
    def rejected(self) -> dict[str, str]:
        return self.known.reasons

    @property
    def helped(self) -> bool:
        """Whether there is a plan that was proven better than leaving everything as it is."""
        return bool(self.winner.values)

    confirmed = helped

    @property
    def is_settled(self) -> bool:
        """Whether the search came to an answer: a proven plan, or that nothing helps."""
        return self.helped or bool(self.seconds and not self.unclear)

    @property
    def why_left(self) -> str:
        return "the search could not tell" if self.unclear else "nothing was proven faster"

    @property
    def record(self) -> Record | None:
        return row_of(self.comparison, self.winner) if self.comparison else None

    @property
    def ratio(self) -> Ratio | None:
        """The winner's speed-up with its interval for any process, or `where` it is proven."""
        return self._ratios()[0 if self.where else 1]

    @property
    def where(self) -> str:
        """` in this process` where the winner is proven in no other; else empty."""
        here, anywhere = self._ratios()
        is_only_here = here and anywhere and here.verdict == "faster" != anywhere.verdict
        return " in this process" if is_only_here else ""

    def _ratios(self) -> tuple[Ratio | None, Ratio | None]:
        """Return the winner's speed-up in this process, and in any process."""
        if self.comparison is None or self.record is None:
            return None, None
        return self.comparison.ratio(self.record), self.comparison.in_any_process(self.record)

    @property
    def proof(self) -> str:
        """The plan with its proven speed-up, in words; empty without a proof."""
        if not self.helped or self.comparison is None:
            return ""
        return f"{self.winner.name} is {self.ratio} as fast as {BASELINE.name}{self.where}"

    @property
    def line(self) -> str:
        return f"`%speedkit apply {','.join(self.named)}".rstrip() + "`"

    @property
    def config(self) -> SpeedConfig:
        """The plan as a config that decides only the switches of the plan, all as `measured`."""
        if not self.helped:
            return SpeedConfig().alone(f"left as it is: {self.why_left}")
        why = f"measured: {self.winner.name} {self.ratio}{self.where}"
        return self.winner.config.with_source("measured", why)

    @property
    def likely_config(self) -> SpeedConfig | None:
        """The likely plan as a config, whose decisions say that it is not proven; None without."""
        if not self.likely:
            return None
        told = self.unclear.partition("; ")[0]
        config = self.known.plans[self.likely].config
        return config.with_source("measured", f"likely, not proven: {told}")

    def is_of(self, models: Iterable[Any], or_more: bool = False) -> bool:
        """Return whether it was a search for these models, `or_more` for these and others."""
        asked, own = (set(map(id, each_once(every))) for every in (models, self.models))
        return asked == own or (or_more and asked < own)

    def apply(self, likely: bool = False) -> list[SpeedContext]:
        """Put the plan into force on the step's models.

        In a notebook the first context becomes `ctx` there, as by `%speedkit apply`. Where nothing
        helps, plans are taken off the models; where nothing is proven yet, a plan in force stays.
        A message says so, and names the lines that your loop needs.

        Args:
            likely: also take a plan that is likely and not proven.

        Returns:
            One SpeedContext for each model; an empty list where nothing is applied.

        Raises:
            SpeedKitError: one of the models is gone.
        """
        contexts, names = self.put_in_force(likely), notebook()
        for context in contexts:
            if names is not None:
                keep(names, name_of(names, context.model), context)
        return contexts

    def put_in_force(self, likely: bool = False) -> list[SpeedContext]:
        """Apply as `apply()` does, for a caller that names the contexts and shows them."""
        models, config = list(self.models), self.config if self.helped else None
        if likely and not self.helped and (config := self.likely_config):
            _say(f"likely, not proven: {self.unclear}")
        if config is not None:
            if len(models) < self._number:
                raise SpeedKitError("the model of this search is gone: search again for the new")
            return [
                apply_speedups(model, config, optimizer=holding(self._optimizers, model))[1]
                for model in models
            ]
        if self.unclear:
            hint = f"; apply(likely=True) takes {self.likely}" if self.likely else ""
            if any(map(applied_to, models)):
                hint += "; another plan is in force and stays: ctx.restore() takes it away"
            _say(f"{self.why_left}, so nothing is applied{hint}")
            return []
        for model in models:
            while (context := applied_to(model)) is not None:
                context.restore()
        return []

    def parts(self) -> list[tuple[str, Ratio]]:
        """Return each part with the factor by which it makes the plan faster."""
        return [(part.word, part.ratio) for part in self.parts_found]

    def rows(self) -> list[dict[str, Any]]:
        return [{"stage": s.title, **row} for s in self.stages for row in s.comparison.rows()]

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
    """Show a line as a result in a notebook; there a warning would name a file of IPython."""
    (messages.warn if notebook() is None else messages.important)(line)


class SearchMemory:
    """The searches of this process: the `last` one, and all answers, newest last.

    Each of `listeners` is called with each answer.
    """

    def __init__(self) -> None:
        self.listeners = Listeners()
        self.forget()
        CHANGES.add(self._applied_or_restored)

    def forget(self) -> None:
        self.last: Tuning | None = None
        self._answers: list[Tuning] = []

    def keep(self, tuning: Tuning) -> None:
        """Remember an answer for the models of its search."""
        self._answers = [one for one in self._answers if one.models] + [tuning]
        self.listeners.tell()

    def of(self, model: torch.nn.Module | None) -> Tuning | None:
        """Return the newest answer for this model; None without one."""
        whole = None if model is None else unwrapped(model)
        fitting = (
            one
            for one in reversed(self._answers)
            if any(unwrapped(known) is whole for known in one.models)
        )
        return next(fitting, None)

    def _applied_or_restored(self, model: torch.nn.Module | None) -> None:
        found = self.of(model)
        if found is not None and model is not None and applied_to(model) is not None:
            found.is_newer = False


# State at module level, on purpose: as plans and flags, it belongs to the process.
MEMORY = SearchMemory()
