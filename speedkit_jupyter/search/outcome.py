"""What a search knows, and what it found: the plan, the proof, and why other plans lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, NamedTuple

from speedkit_jupyter.plans.applying import applied_to, apply_speedups, to_write
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.naming import keep, name_of
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.budget import LONGER
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.presentable import Shown
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.rounds.statistics import BUSY, INTERVAL, SAME, TICK_S, Ratio
from speedkit_jupyter.search.candidates import BASELINE, Candidate
from speedkit_jupyter.search.found import FoundPlan
from speedkit_jupyter.search.objective import (
    LIKELY,
    Aim,
    PlanPart,
    is_out,
    memory_saved,
    parts_of,
    row_of,
)
from speedkit_jupyter.step.discovery import holding
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.database import Kept
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.lookup import notebook
from speedkit_jupyter.support.units import WIDE, between, count, ratio, share
from speedkit_jupyter.support.weak import Alive
from speedkit_jupyter.support.wrappers import each_once

# Fewer rounds than these make no plan likely, nor show on a busy machine that it brings nothing.
FEW_ROUNDS = 3
INTERRUPTED = "interrupted"
MORE = "`--more` goes on from here"
# The best so far is looked up so often at most: in a race of short steps that takes its time.
SAYS_S = 0.5


class Stage(NamedTuple):
    title: str
    comparison: Comparison


@dataclass(frozen=True)
class TimedPlan:
    """The last that a search has seen of a candidate."""

    comparison: Comparison
    record: Record

    @property
    def is_out(self) -> bool:
        return self.record.same_as_baseline or is_out(self.comparison, self.record)

    @property
    def ratio(self) -> Ratio:
        """Its speed-up; 0 in 0 rounds where that is not known, or where it can't be the plan."""
        found = None if self.is_out else self.comparison.ratio(self.record)
        return found or Ratio(0.0, 0.0, 0.0, 0)

    @property
    def range(self) -> tuple[float, float]:
        """The interval of the speed-up, or the range of its rounds where there is none."""
        if self.ratio.is_bounded:
            return self.ratio.low, self.ratio.high
        pairs = zip(self.comparison.baseline.times_s, self.record.times_s, strict=False)
        ratios = [before / max(now, TICK_S) for before, now in pairs]
        return min(ratios), max(ratios)

    @property
    def is_vague(self) -> bool:
        """Whether its rounds say nothing: their range is wide, or the load decides."""
        low, high = self.range
        by_load = self.comparison.load_decides(self.comparison.baseline, self.record)
        return high > WIDE * low or by_load

    @property
    def is_undecided(self) -> bool:
        """Whether it works, and its rounds are too few, or too vague, to show whether it helps."""
        is_slow = "far slower" in self.record.notes.get("left out", "")
        enough = FEW_ROUNDS if self.comparison.busy else 1
        has_few = self.ratio.pairs < enough or self.is_vague
        return has_few and not self.is_out and not is_slow

    @property
    def may_help(self) -> bool:
        """Whether more rounds may show that it helps."""
        return self.ratio.pairs < FEW_ROUNDS or self.range[1] >= LIKELY

    def is_likely(self, aim: Aim) -> bool:
        """Return whether enough speaks for it, and nothing against."""
        if self.ratio.pairs < FEW_ROUNDS or self.is_vague:
            return False
        gain = aim.gain(self.comparison, self.record) if aim.memory else self.ratio.median - 1
        return gain > 0 and (aim.memory or self.range[1] >= LIKELY)

    def worth(self, aim: Aim) -> float:
        """Return how many times better it looks; 0 where that is not known."""
        saved = memory_saved(self.comparison.baseline, self.record)
        return saved if aim.memory else self.ratio.median

    def told(self, aim: Aim, how: str = "") -> str:
        """Return `bf16 is 1.90× as fast (1.40× to 2.60× in 6 rounds)`; `how` stands before that."""
        low, high = map(ratio, self.range)
        speed = f"{ratio(self.ratio.median)} as fast"
        if self.is_vague:
            return f"{self.record.name}: {low} to {high} in {count(self.ratio.pairs, 'round')}"
        if aim.memory and (saved := self.worth(aim)):
            speed += f" with {share(1 / saved)} of the peak memory"
        spread = f"{low} to {high} " if self.ratio.pairs > 1 else ""
        rounds = f"{spread}in {count(self.ratio.pairs, 'round')}"
        return f"{self.record.name} is {how}{speed} ({rounds})"


@dataclass
class SearchState:
    """What a search knows of the plans for a step.

    `stages` are its benchmarks, with all timed rounds; `tried` the plans that raced, by name,
    `refused` those that failed or are wrong, `left` those that wait for more time; `reasons` say
    why a plan or a part was not taken.
    """

    stages: list[Stage] = field(default_factory=list)
    tried: dict[str, Candidate] = field(default_factory=dict)
    refused: list[Candidate] = field(default_factory=list)
    left: list[Candidate] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[TimedPlan]:
        """Return the last that was seen of each candidate; a round or two tell nothing new."""
        rows: dict[str, TimedPlan] = {}
        for comparison in (stage.comparison for stage in self.stages):
            for record in comparison.records[1:]:
                known = rows.get(record.name)
                least = min(len(known.record.times_s), FEW_ROUNDS) if known else 0
                if known is None or record.failure or len(record.times_s) >= max(least, 1):
                    rows[record.name] = TimedPlan(comparison, record)
        return list(rows.values())

    def refuse(self, name: str, reason: str) -> None:
        """Note why it is not in the plan, in place of an earlier reason."""
        self.reasons.pop(name, None)
        self.reasons[name] = reason

    def wait_again(self) -> None:
        """Let what raced without an answer wait for more time."""
        for name in [row.record.name for row in self.rows() if row.is_undecided]:
            self.left += [self.tried.pop(name)] if name in self.tried else []

    def why_unclear(self, step_s: float) -> str:
        """Return why the time was too short to tell anything; empty where it was not."""
        rows = {row.record.name: row for row in self.rows()}
        if not rows and (self.tried or self.left):
            return f"one step takes {step_s:.2g} s"
        if self.left:
            return f"{count(len(self.left), 'plan')} had no time"
        decided = sum(name in rows and not rows[name].is_undecided for name in self.tried)
        is_open = 2 * decided < len(self.tried)
        return "too few undisturbed rounds for most of the plans" if is_open else ""

    def is_new(self, plan: Candidate) -> bool:
        """Return whether it has not raced, and no part of it was wrong, or far slower by itself."""
        slow = {row.record.name for row in self.rows() if "dropped" in row.record.notes}
        is_slow = slow & {plan.part(name).name for name in plan.values}
        is_wrong = any(other.values.items() <= plan.values.items() for other in self.refused)
        return not (plan.name in self.tried or is_slow or is_wrong)

    def best(self, aim: Aim) -> TimedPlan | None:
        """Return the best of what may help, or of all; of equals that of fewest parts."""
        known = [row for row in self.rows() if row.record.name in self.plans]
        rows = {frozenset(row.record.name.split("+")): row for row in known}
        refused = [parts for parts, row in rows.items() if is_out(row.comparison, row.record)]
        timed = [
            row
            for parts, row in rows.items()
            if row.ratio.pairs and not any(other <= parts for other in refused)
        ]
        able = [row for row in timed if row.is_likely(aim)] or timed
        most = max((row.worth(aim) for row in able), default=0.0)
        equal = [row for row in able if row.worth(aim) * (1 + SAME) >= most]
        return min(equal, key=lambda row: row.record.name.count("+"), default=None)

    @property
    def plans(self) -> dict[str, Candidate]:
        return {plan.name: plan for plan in self.left} | self.tried


@dataclass(repr=False)
class Tuning(Shown):
    """The result, one of three: a proven plan, the `winner`; one that is `likely`; or neither,
    where the answer is to leave everything as it is.

    `comparison` is the proof, in fresh rounds: of baseline, the winner, and the winner without each
    of its parts; `parts_found` is what each part is worth. Without a winner `unclear` says why the
    search could not tell; it is empty where nothing helps. `kept` are the optimizations that it was
    to leave as they are, `named` the notebook's names for its models, `learned` the plan that an
    earlier search had found for this step. `seconds` is how long it all took, `compiling_s` of them
    compiling. `models` are those of the step that are still there: a result keeps none alive.
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
        # What `so_far` has said, and until when.
        self._so_far, self._says_until_s = "", 0.0

    def so_far(self, running: Comparison) -> str:
        """Return `best so far: bf16 2.10× (round 3); ` of the benchmark that runs; empty before."""
        if (now_s := clock.now()) >= self._says_until_s:
            known = replace(self.known, stages=[Stage("", running)])
            if best := known.best(self.wanted):
                busy = f"{BUSY}; " if running.busy else ""
                gain = f"{best.record.name} {ratio(best.ratio.median)} (round {best.ratio.pairs})"
                gain = best.told(self.wanted) if self.wanted.memory else gain
                self._so_far, self._says_until_s = f"{busy}best so far: {gain}; ", now_s + SAYS_S
        return self._so_far

    def take(self, plan: Candidate, comparison: Comparison) -> None:
        """Note a plan that is proven by these rounds."""
        self.winner, self.comparison = plan, comparison
        self.parts_found = parts_of(plan, comparison)
        self.known.reasons.pop(plan.name, None)

    def conclude(self, why: str) -> None:
        """Say what of the plan is not proven, or without one what is likely.

        `why` says why no more is known. Without one, and if no plan may help, nothing does.
        """
        if self.helped and self.comparison:
            proven = {part.name for part in self.parts_found if part.is_proven}
            words = {name: self.winner.part(name).name for name in self.winner.values}
            unproven = [word for name, word in words.items() if name not in proven]
            if unproven and not self.learned and len(self.winner.values) > 1:
                adds = f"{' and '.join(unproven)} add{'s' * (len(unproven) == 1)}"
                self.notes.append(f"The plan is proven as a whole; what {adds} to it is not")
            return
        self.learned = None
        best, busy = self.known.best(self.wanted), BUSY if self.busy else ""
        if best is not None and best.is_likely(self.wanted):
            self.likely = best.record.name
            told = [busy, best.told(self.wanted, "probably about "), why]
        elif why or (self.most >= LIKELY and not self.wanted.memory):
            told = [busy, f"{why} before anything helped" if why == INTERRUPTED else why]
            told += [f"best seen: {best.told(self.wanted)}"] if best else []
        else:
            return
        self.unclear = "; ".join(filter(None, [*told, MORE if best else LONGER]))

    @property
    def busy(self) -> str:
        """How much other processes held up the last rounds that they did; empty if hardly any."""
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
        """Why a plan or a part is not in the plan, by its name."""
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
    def found(self) -> FoundPlan:
        """What the session remembers of the search, so that every view speaks of it."""
        proof, found = self.winner.name if self.helped else "", self.proven
        if found is not None and self.comparison is not None:
            proof += f" is {ratio(found.median)} as fast as {self.comparison.baseline.name}"
            proof += f", {INTERVAL} {between(found.low, found.high)}" * found.is_bounded
            proof += self.where
        return FoundPlan(self.config, proof, ",".join(self.named))

    @property
    def config(self) -> SpeedConfig:
        """The plan as a config: what it names and no more. All that it decides was measured."""
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
        """Return whether it was a search for these models, `or_more` for others beside them."""
        asked, own = (set(map(id, each_once(those))) for those in (models, self.models))
        return asked == own or (or_more and asked < own)

    def apply(self, likely: bool = False) -> list[SpeedContext]:
        """Put the plan into force on the step's models; return one context for each.

        It must be proven, or with `likely` no more than that. In a notebook the first context
        becomes `ctx` there, as by `%speedkit apply`. Where nothing helps, the models are restored
        to no plan; where nothing is proven yet, a plan that is in force stays. That, and what has
        to be written in the loop, is said. Raises SpeedKitError where one of the models is gone.
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
        """Do as `apply` does, for a caller that names the contexts and says the rest."""
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
        """Return each part, and how many times as fast the plan is with it as without it."""
        return [(part.word, part.ratio) for part in self.parts_found]

    def rows(self) -> list[dict[str, Any]]:
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
    """Say it as a result in a notebook, where a warning would show IPython's file of the cell."""
    (messages.warn if notebook() is None else messages.important)(line)
