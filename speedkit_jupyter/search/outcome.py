"""The result of a search: the plan, its proof, and why other plans lost; and the newest results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field, replace
from typing import Any
from weakref import ref

import torch

from speedkit_jupyter.plans.applying import applied_to, apply_speedups, to_write
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.context import CHANGES, SpeedContext
from speedkit_jupyter.plans.naming import keep, name_of
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.budget import LONGER
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.presentable import Shown
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.rounds.statistics import BUSY, INTERVAL, Ratio
from speedkit_jupyter.search.candidates import BASELINE, Candidate
from speedkit_jupyter.search.knowledge import SearchState, Stage
from speedkit_jupyter.search.objective import LIKELY, Aim, PlanPart, parts_of, row_of
from speedkit_jupyter.step.discovery import holding
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.database import Kept
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.lookup import notebook
from speedkit_jupyter.support.units import between, ratio
from speedkit_jupyter.support.weak import Alive, Listeners
from speedkit_jupyter.support.wrappers import each_once, unwrapped

INTERRUPTED = "interrupted"
MORE = "`--more` goes on from here"


@dataclass(repr=False)
class Tuning(Shown):
    """The result of a search: a proven plan, the `winner`; one that is `likely`; or neither, where
    the answer is to leave everything as it is.

    `comparison` is the proof, in fresh rounds: of baseline, the winner, and the winner without each
    of its parts; `parts_found` has the gain of each part. Without a winner `unclear` says why the
    search could not tell; it is empty where nothing helps. `kept` are the optimizations to leave as
    they are, `named` the notebook's names for the models, `learned` the plan that an earlier search
    had found for this step. `seconds` is the time of the whole search, `compiling_s` of them
    compiling. `models` are the step's models that still exist: a result keeps none alive.
    """

    step: InitVar[Step]
    objective: str = "time"
    within: float | None = None
    steps: int | None = None
    kept: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
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
        self.source = step.source
        self.wanted = Aim(self.objective == "memory", self.within, self.steps)
        self.is_newer = True  # until a plan is applied to one of the models
        self._so_far, self._says_until_s = "", 0.0

    def so_far(self, running: Comparison) -> str:
        """Return `best so far: bf16 2.10× (round 3); ` of the benchmark that runs; empty before.

        It is updated twice a second at most: in a race of short steps that takes their time.
        """
        if (now_s := clock.now()) >= self._says_until_s:
            known = replace(self.known, stages=[Stage("", running)])
            if best := known.best(self.wanted):
                busy = f"{BUSY}; " if running.busy else ""
                gain = f"{best.name} {ratio(best.ratio.median)} (round {best.ratio.pairs})"
                gain = best.told(self.wanted) if self.wanted.memory else gain
                self._so_far, self._says_until_s = f"{busy}best so far: {gain}; ", now_s + 0.5
        return self._so_far

    def take(self, plan: Candidate, comparison: Comparison) -> None:
        """Note a plan that is proven by these rounds."""
        self.winner, self.comparison = plan, comparison
        self.parts_found = parts_of(plan, comparison)
        self.known.reasons.pop(plan.name, None)

    def conclude(self, why: str) -> None:
        """Note which parts of the plan are not proven; without a plan, which one is likely.

        `why` says why no more is known. Where it is empty, and no plan may help, nothing does.
        """
        if self.helped and self.comparison:
            proven = {part.name for part in self.parts_found if part.is_proven}
            words = {name: self.winner.part(name).name for name in self.winner.values}
            unproven = [word for name, word in words.items() if name not in proven]
            if unproven and not self.learned and len(self.winner.values) > 1:
                parts = ", ".join(unproven)
                self.notes.append(f"The plan is proven as a whole; not proven alone: {parts}")
            return
        self.learned = None
        best, busy = self.known.best(self.wanted), BUSY if self.busy else ""
        if best is not None and best.is_likely(self.wanted):
            self.likely = best.name
            told = [busy, best.told(self.wanted, "probably about "), why]
        elif why or (self.most >= LIKELY and not self.wanted.memory):
            told = [busy, f"{why} before anything helped" if why == INTERRUPTED else why]
            told += [f"best seen: {best.told(self.wanted)}"] if best else []
        else:
            return
        self.unclear = "; ".join(filter(None, [*told, MORE if best else LONGER]))

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
        """The reason why a plan or a part was not taken, by its name."""
        return self.known.reasons

    @property
    def aim(self) -> str:
        return self.objective if self.within is None else f"{self.objective} within {self.within:g}"

    @property
    def helped(self) -> bool:
        """Whether there is a plan that was proven better than leaving everything as it is."""
        return bool(self.winner.values)

    confirmed = helped

    @property
    def record(self) -> Record | None:
        """The winner's row in `comparison`; None where there is none."""
        return row_of(self.comparison, self.winner) if self.comparison else None

    @property
    def ratio(self) -> Ratio | None:
        """The winner's speed-up over baseline, with the interval for any process."""
        if self.comparison is None or self.record is None:
            return None
        return self.comparison.in_any_process(self.record)

    @property
    def proven(self) -> Ratio | None:
        """The winner's speed-up with the interval that is proven: for any process, or for this."""
        here = self.comparison.ratio(self.record) if self.comparison and self.record else None
        is_only_here = here and self.ratio and here.verdict == "faster" != self.ratio.verdict
        return here if is_only_here else self.ratio

    @property
    def where(self) -> str:
        """` in this process` where the winner is proven in no other; else empty."""
        return "" if self.proven == self.ratio else " in this process"

    @property
    def is_settled(self) -> bool:
        """Whether the search came to an answer: a proven plan, or that nothing helps."""
        return self.helped or bool(self.seconds and not self.unclear)

    @property
    def proof(self) -> str:
        """The plan with its proven speed-up, as every view tells it; empty without one."""
        if not self.helped or self.comparison is None:
            return ""
        told, proven = self.winner.name, self.proven
        if proven is not None:
            told += f" is {ratio(proven.median)} as fast as {self.comparison.baseline.name}"
            told += f", {INTERVAL} {between(proven.low, proven.high)}" * proven.is_bounded
        return f"{told}{self.where}"

    @property
    def line(self) -> str:
        """The magic that puts it into force."""
        return f"`%speedkit apply {','.join(self.named)}".rstrip() + "`"

    @property
    def config(self) -> SpeedConfig:
        """The plan as a config that decides only the switches of the plan, all as `measured`."""
        if not self.helped:
            told = "the search could not tell" if self.unclear else "nothing was proven faster"
            return SpeedConfig().alone(f"left as it is: {told}")
        config = self.winner.variant().config
        assert config is not None
        why = f"measured: {self.winner.name} {self.proven}{self.where}"
        return config.with_source("measured", why)

    @property
    def likely_config(self) -> SpeedConfig | None:
        """The likely plan as a config, whose decisions say that it is not proven; None without."""
        config = self.known.plans[self.likely].variant().config if self.likely else None
        told = "; ".join(self.unclear.split("; ")[: 1 + bool(self.busy)])
        why = f"likely, not proven: {told}"
        return config and config.with_source("measured", why)

    def is_of(self, models: Iterable[Any], or_more: bool = False) -> bool:
        """Return whether it was a search for these models, `or_more` for these and others."""
        asked, own = (set(map(id, each_once(those))) for those in (models, self.models))
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
            ctx, where = "ctx", "; `ctx` is what apply() returns: `ctx, *_ = tuning.apply()`"
            if names is not None:
                ctx, where = keep(names, name_of(names, context.model), context), ""
            if line := to_write(context, ctx, names):
                _say(f"{line.rstrip('.')}{where}")
        return contexts

    def put_in_force(self, likely: bool = False) -> list[SpeedContext]:
        """Apply as `apply()` does, for a caller that names the contexts and shows them."""
        models, config = list(self.models), self.config if self.helped else None
        if likely and not self.helped and (config := self.likely_config):
            _say(f"likely, not proven: {self.unclear}")
        if config is not None and len(models) < self._number:
            raise SpeedKitError("the model of this search is gone: search again with the new one")
        if config is not None:
            return [
                apply_speedups(model, config, optimizer=holding(self._optimizers, model))[1]
                for model in models
            ]
        if self.unclear:
            stays = "; another plan is in force and stays: ctx.restore() takes it away"
            hint = f"; apply(likely=True) takes {self.likely}" if self.likely else ""
            line = f"the search could not tell, so nothing is applied{hint}"
            _say(f"{line}{stays if any(map(applied_to, models)) else ''}")
            return []
        for model in models:
            while (context := applied_to(model)) is not None:
                context.restore()
        return []

    def parts(self) -> list[tuple[str, Ratio]]:
        """Return each part with the factor by which it makes the plan faster."""
        return [(part.word, part.ratio) for part in self.parts_found]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each variant of each stage."""
        return [{"stage": s.title, **row} for s in self.stages for row in s.comparison.rows()]

    def to_dict(self) -> dict[str, Any]:
        plain = ("objective", "within", "steps", "seconds", "compiling_s", "confirmed", "likely")
        return {
            "winner": self.winner.name,
            "plan": dict(self.winner.values),
            **{name: getattr(self, name) for name in (*plain, "unclear")},
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
    """The searches of this process: the `last` one, and the newest answer for each model.

    `listeners` are told of each answer.
    """

    def __init__(self) -> None:
        self.listeners = Listeners()
        self.forget()
        CHANGES.add(self._applied_or_restored)

    def forget(self) -> None:
        """Forget all searches."""
        self.last: Tuning | None = None
        # By the id of a model, since a model may have no hash.
        self._by_model: dict[int, tuple[ref[torch.nn.Module], Tuning]] = {}

    def keep(self, tuning: Tuning) -> None:
        """Remember an answer for the models of its search."""
        for model in map(unwrapped, tuning.models):
            self._by_model[id(model)] = (ref(model), tuning)
        self.listeners.tell()

    def of(self, model: torch.nn.Module | None) -> Tuning | None:
        """Return the newest answer for this model; None without one."""
        whole = None if model is None else unwrapped(model)
        reference, found = self._by_model.get(id(whole), (None, None))
        return found if reference is not None and reference() is whole else None

    def _applied_or_restored(self, model: torch.nn.Module | None) -> None:
        found = self.of(model)
        if found is not None and model is not None and applied_to(model) is not None:
            found.is_newer = False


# State at module level, on purpose: as plans and flags, it belongs to the process.
MEMORY = SearchMemory()
