"""What a search found: the plan, the proof, and what was rejected with its reason."""

from __future__ import annotations

import math
from dataclasses import InitVar, asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.presentable import Shown
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.results.statistics import INTERVAL, SAME, TICK_S, Ratio
from speedkit_jupyter.measure.rounds.budget import LONGER
from speedkit_jupyter.measure.subject.discovery import holding
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.plans.applying import applied_to, apply_speedups, to_write
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.planning import Plan, plan, together
from speedkit_jupyter.session import Found, current, notebook
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.database import Learned
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.weak import Alive
from speedkit_jupyter.support.words import count
from speedkit_jupyter.tuning import learning
from speedkit_jupyter.tuning.aim import is_out, memory_saved
from speedkit_jupyter.tuning.candidates import Candidate, Part, parts_of

if TYPE_CHECKING:
    from speedkit_jupyter.machines.hardware import Hardware
    from speedkit_jupyter.optimizations.facts.model import Facts

# Whose upper bound is below this is nothing to gain.
LIKELY = 1.05
# Fewer rounds than these on a busy machine do not show that a plan brings nothing.
FEW_ROUNDS = 3
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Stage:
    """One benchmark of the search."""

    title: str
    comparison: Comparison


@dataclass(frozen=True)
class Rejected:
    """A candidate that is not part of the plan, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Timed:
    """The last that a search has seen of a candidate. `ratio` is its speed-up; None where that is
    not known, or where it can't be the plan.
    """

    comparison: Comparison
    record: Record
    ratio: Ratio | None

    @property
    def words(self) -> set[str]:
        """The words of its parts."""
        return set(self.record.name.split("+"))

    @property
    def speedup(self) -> float:
        """The ratio's median; 0 without one."""
        return 0.0 if self.ratio is None else self.ratio.median

    @property
    def range(self) -> tuple[float, float]:
        """From where to where it may be: the interval, or the single rounds where there is none."""
        if self.ratio is not None and self.ratio.is_bounded:
            return self.ratio.low, self.ratio.high
        pairs = zip(self.comparison.baseline.times_s, self.record.times_s, strict=False)
        ratios = [before / max(now, TICK_S) for before, now in pairs] or [0.0]
        return min(ratios), max(ratios)

    @property
    def is_undecided(self) -> bool:
        """Whether it works, and no round, or few on a busy machine, show whether it helps."""
        record = self.record
        refused = record.same_as_baseline or is_out(self.comparison, record)
        is_slow = "far slower" in record.notes.get("left out", "")
        pairs = self.ratio.pairs if self.ratio is not None else 0
        enough = FEW_ROUNDS if self.comparison.busy else 1
        return pairs < enough and not refused and not is_slow

    @property
    def may_help(self) -> bool:
        """Whether something speaks for it, and nothing against."""
        return self.speedup > 1 and self.range[1] >= LIKELY

    def __str__(self) -> str:
        rounds = count(self.ratio.pairs if self.ratio else 0, "round")
        low, high = self.range
        number = f"{self.speedup:.2f}× as fast ({low:.2f}× to {high:.2f}× in {rounds})"
        return f"{self.record.name} is probably about {number}, not proven"


@dataclass(repr=False)
class Tuning(Shown):
    """The result, one of three: a proven plan, the `winner`; one that is `likely`; or neither,
    where the answer is to leave everything as it is.

    `comparison` is the proof, fresh rounds that took no part in choosing: of baseline, the winner,
    and the winner without each of its parts; `parts_found` is what each part is worth. Where there
    is no winner, `unclear` says why the search could not tell, and what is `likely` by name; it is
    empty where nothing helps.
    `kept` are the optimizations that it was to leave as they are.
    `named` is how the notebook calls its models, where `%speedkit apply` has to be told.
    `learned` is the plan that an earlier search had found for this step. `seconds` is how long it
    all took, `compiling_s` of them compiling. `models` are those of the step that are still there:
    a result keeps none alive. `facts` are the first one's, `facts_of_others` those of the rest.
    """

    step: InitVar[Step]
    hardware: Hardware
    facts: Facts
    objective: str = "time"
    within: float | None = None
    steps: int | None = None
    winner: Candidate = field(default_factory=lambda: Candidate({}))
    confirmed: bool = False
    comparison: Comparison | None = None
    likely: str = ""
    unclear: str = ""
    parts_found: list[Part] = field(default_factory=list)
    learned: Learned | None = None
    stages: list[Stage] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kept: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    seconds: float = 0.0
    compiling_s: float = 0.0
    facts_of_others: tuple[Facts, ...] = ()

    def __post_init__(self, step: Step) -> None:
        self.models = Alive(step.models)
        self._number = len(step.models)
        self._optimizers = Alive(step.optimizers)

    def last_rows(self) -> list[Timed]:
        """Return the last that was seen of each candidate."""
        rows = {}
        for stage in self.stages:
            found = stage.comparison
            for record in found.records[1:]:
                no_plan = record.same_as_baseline or is_out(found, record)
                rows[record.name] = Timed(found, record, None if no_plan else found.ratio(record))
        return list(rows.values())

    def take(self, plan: Candidate, comparison: Comparison) -> None:
        """Note a plan that is proven by these rounds."""
        self.winner, self.comparison, self.confirmed = plan, comparison, True
        self.likely = self.unclear = ""
        self.parts_found = parts_of(plan, comparison)
        self.rejected = [other for other in self.rejected if other.name != plan.name]

    def refuse(self, name: str, reason: str) -> None:
        """Note why it is not in the plan, in place of an earlier reason."""
        rest = [candidate for candidate in self.rejected if candidate.name != name]
        self.rejected = [*rest, Rejected(name, reason)]

    def conclude(self, why: str) -> None:
        """Without a proven plan say what is likely, and why (interrupted, say) it is not known.

        Where `why` is empty and no candidate may help, the answer is that nothing does.
        """
        if self.confirmed:
            unproven = [part.word for part in self.parts_found if part.ratio and not part.is_proven]
            if unproven and len(self.winner.values) > 1:
                names = " and ".join(unproven)
                self.notes.append(f"The plan is proven as a whole; what {names} adds to it is not")
            return
        self.winner, self.comparison, self.learned = Candidate({}), None, None
        rows = self.last_rows()
        undecided = [row for row in rows if row.is_undecided]
        if not why and 2 * len(undecided) > len(rows):
            why = "too few undisturbed rounds for most of the plans"
        refused = [row.words for row in rows if is_out(row.comparison, row.record)]
        rows = [row for row in rows if row.may_help and not any(o <= row.words for o in refused)]
        if self.objective == "memory":
            rows = [row for row in rows if memory_saved(row.comparison.baseline, row.record) > 1]
        most = max((row.speedup for row in rows), default=0.0)
        equal = [row for row in rows if row.speedup * (1 + SAME) >= most]
        best = min(equal, key=lambda row: len(row.words), default=None)
        if best is None:
            ends = "" if why == INTERRUPTED else f"; {LONGER}"
            self.unclear = f"{why}{ends or ' before anything helped'}" if why else ""
            return
        self.likely = best.record.name
        reasons = [why, best.comparison.busy.partition(":")[0]]
        self.unclear = "; ".join(filter(None, [str(best), *reasons, LONGER]))

    @property
    def aim(self) -> str:
        """What is to be less, in words that tell one search from another."""
        return self.objective if self.within is None else f"{self.objective} within {self.within:g}"

    @property
    def helped(self) -> bool:
        """Whether there is a plan that was proven better than leaving everything as it is."""
        return bool(self.winner.values)

    @property
    def record(self) -> Record | None:
        """The winner's row in `comparison`; None where there is none."""
        rows = () if self.comparison is None else self.comparison.records[1:]
        return next((row for row in rows if row.name == self.winner.name), None)

    @property
    def ratio(self) -> Ratio | None:
        """The winner's speed-up over baseline with its interval."""
        if self.comparison is None or self.record is None:
            return None
        return self.comparison.ratio(self.record)

    @property
    def is_settled(self) -> bool:
        """Whether the search came to an answer: a confirmed plan, or that nothing helps."""
        return self.confirmed or bool(self.seconds and not (self.helped or self.unclear))

    @property
    def found(self) -> Found:
        """What the session remembers of the search, so that every view speaks of it."""
        proof, ratio = self.winner.name if self.helped else "", self.ratio
        if self.helped and ratio is not None and self.comparison is not None:
            against = f"as fast as {self.comparison.baseline.name}"
            proof += f" is {ratio.median:.2f}× {against}"
            proof += f", {INTERVAL} {ratio.low:.2f}× to {ratio.high:.2f}×" * ratio.is_bounded
        return Found(self.config, proof, ",".join(self.named))

    @property
    def config(self) -> SpeedConfig:
        """The plan as a config: what it names and no more. All that it decides was measured."""
        if not self.helped:
            told = "the search could not tell" if self.unclear else "nothing was proven faster"
            return SpeedConfig().alone(f"left as it is: {told}")
        config = self.winner.variant().config
        assert config is not None
        return config.with_source("measured", self._why())

    @property
    def plan(self) -> Plan:
        """The decisions; each one that is active was measured."""
        every = (self.facts, *self.facts_of_others)
        return together([plan(self.config, self.hardware, facts) for facts in every])

    def apply(self) -> list[SpeedContext]:
        """Put the plan into force on the step's models; one context each.

        In a notebook the first context becomes `ctx` there, as by `%speedkit apply`. A warning says
        what has to be written in the loop so that its precision acts.

        Where nothing helps, the models are restored to no plan, and none comes back. Where nothing
        is proven yet, a plan that is in force stays; a warning says so. Raises SpeedKitError where
        one of the models is gone.
        """
        contexts, session = self.put_in_force(), current(notebook())
        for context in contexts:
            ctx, where = "ctx", "; `ctx` is what apply() returns: `ctx, *_ = tuning.apply()`"
            if session.names is not None:
                ctx, where = session.keep(session.name_of(context.model), context), ""
            if line := to_write(context, ctx, session.names):
                messages.warn(f"{line.rstrip('.')}{where}")
        return contexts

    def put_in_force(self) -> list[SpeedContext]:
        """As `apply`, for whoever names the contexts and says the rest."""
        models = list(self.models)
        if self.helped:
            if len(models) < self._number:
                raise SpeedKitError(
                    "the model of this search is gone: search again with the new one"
                )
            return [
                apply_speedups(model, self.config, optimizer=holding(self._optimizers, model))[1]
                for model in models
            ]
        if self.unclear:
            stays = "; another plan is in force and stays: ctx.restore() takes it away"
            line = "the search could not tell, so nothing is applied"
            messages.warn(f"{line}{stays if any(map(applied_to, models)) else ''}")
            return []
        for model in models:
            while (context := applied_to(model)) is not None:
                context.restore()
        return []

    def parts(self) -> list[tuple[str, Ratio]]:
        """Each part of the winner, with how many times as fast the plan is with it as without it;
        all from the rounds that confirmed. Empty until then, and without what was not measured.
        """
        return [(part.word, part.ratio) for part in self.parts_found if part.ratio is not None]

    def _why(self) -> str:
        ratio = self.ratio
        if ratio is not None:
            return learning.proof(self.winner.name, ratio.median, ratio.low, ratio.high)
        return "measured" if self.learned is None else learning.why(self.learned)

    def rows(self) -> list[dict[str, Any]]:
        """One for each variant of each stage: races, then the proof."""
        return [{"stage": s.title, **row} for s in self.stages for row in s.comparison.rows()]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "winner": self.winner.name,
            "plan": dict(self.winner.values),
            "objective": self.objective,
            "within": self.within,
            "steps": self.steps,
            "kept": list(self.kept),
            "seconds": self.seconds,
            "compiling_s": self.compiling_s,
            "confirmed": self.confirmed,
            "likely": self.likely,
            "unclear": self.unclear,
            "parts": [_row(word, ratio) for word, ratio in self.parts()],
            "learned_at": None if self.learned is None else self.learned.learned_at.isoformat(),
            "comparison": None if self.comparison is None else self.comparison.to_dict(),
            "notes": list(self.notes),
            "stages": [{"title": s.title, **s.comparison.to_dict()} for s in self.stages],
            "rejected": [
                {"name": candidate.name, "reason": candidate.reason} for candidate in self.rejected
            ],
        }


def _row(word: str, ratio: Ratio) -> dict[str, Any]:
    high = None if math.isinf(ratio.high) else ratio.high
    return {"part": word, **asdict(ratio), "high": high}


def row_of(comparison: Comparison, plan: Candidate) -> Record:
    """Return the plan's row."""
    return next(record for record in comparison.records if record.name == plan.name)
