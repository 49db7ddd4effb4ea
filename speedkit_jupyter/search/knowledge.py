"""The plans that a search has timed, and which of the others are worth trying next."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.rounds.statistics import SAME, TICK_S, Ratio
from speedkit_jupyter.search.candidates import ALWAYS, Candidate
from speedkit_jupyter.search.objective import FEW_ROUNDS, LIKELY, WORTH_IT, is_out
from speedkit_jupyter.support.units import WIDE, count, ratio

# Plans that people write by hand: a proof has them next to the best plan, if they were faster.
BY_HAND = ("bf16", "fp16", "compile", "bf16+compile", "fp16+compile")


class Stage(NamedTuple):
    """One benchmark of a search, under the title that its progress and its rows show."""

    title: str
    comparison: Comparison


@dataclass(frozen=True)
class TimedPlan:
    """The newest times of a candidate, and the comparison that they belong to."""

    comparison: Comparison
    record: Record

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def is_out(self) -> bool:
        return self.record.same_as_baseline or is_out(self.comparison, self.record)

    @property
    def ratio(self) -> Ratio:
        """The speed-up; 0 in 0 rounds where that is not known, or where it can't be the plan."""
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
    def is_likely(self) -> bool:
        """Whether enough rounds show a gain of the plan, and none a loss."""
        is_told = self.ratio.pairs >= FEW_ROUNDS and not self.is_vague
        return is_told and self.ratio.median > 1 and self.range[1] >= LIKELY

    def told(self, how: str = "") -> str:
        """Return `bf16 is 1.90× as fast (1.40× to 2.60× in 6 rounds)`; `how` comes before 1.90×."""
        low, high = map(ratio, self.range)
        rounds = count(self.ratio.pairs, "round")
        if self.is_vague:
            return f"{self.name}, too noisy to tell after {rounds}"
        spread = f"{low} to {high} " if self.ratio.pairs > 1 else ""
        return f"{self.name} is {how}{ratio(self.ratio.median)} as fast ({spread}in {rounds})"


@dataclass
class SearchState:
    """All that a search knows of the plans for a step.

    `stages` are its benchmarks, with all timed rounds; `tried` the plans that raced, by name,
    `refused` the plans that failed or are wrong, `left` the plans that wait for time; `reasons` say
    why a plan or a part was not taken.
    """

    stages: list[Stage] = field(default_factory=list)
    tried: dict[str, Candidate] = field(default_factory=dict)
    refused: list[Candidate] = field(default_factory=list)
    left: list[Candidate] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def plans(self) -> dict[str, Candidate]:
        return {plan.name: plan for plan in self.left} | self.tried

    def rows(self) -> list[TimedPlan]:
        """Return the newest times of each candidate; a round or two replace no longer benchmark."""
        rows: dict[str, TimedPlan] = {}
        for comparison in (stage.comparison for stage in self.stages):
            for record in comparison.records[1:]:
                known = rows.get(record.name)
                least = min(len(known.record.times_s), FEW_ROUNDS) if known else 0
                if known is None or record.failure or len(record.times_s) >= max(least, 1):
                    rows[record.name] = TimedPlan(comparison, record)
        return list(rows.values())

    def row_of(self, plan: Candidate) -> TimedPlan | None:
        return next((row for row in self.rows() if row.name == plan.name), None)

    def refuse(self, name: str, reason: str) -> None:
        """Note why a plan is not taken, in place of an earlier reason."""
        self.reasons.pop(name, None)
        self.reasons[name] = reason

    def drop_known(self) -> None:
        """Let only new plans wait."""
        self.left = [plan for plan in self.left if self.is_new(plan)]

    def why_unclear(self, step_s: float) -> str:
        """Return why the time was too short to tell anything; empty where it was not."""
        rows = {row.name: row for row in self.rows()}
        if not rows and (self.tried or self.left):
            return f"one step takes {step_s:.2g} s"
        if self.left:
            return f"{count(len(self.left), 'plan')} had no time"
        decided = sum(name in rows and not rows[name].is_undecided for name in self.tried)
        is_open = 2 * decided < len(self.tried)
        return "too few undisturbed rounds for most of the plans" if is_open else ""

    def is_new(self, plan: Candidate) -> bool:
        """Return whether it has not raced, and no part of it was wrong, or far slower by itself."""
        slow = {row.name for row in self.rows() if "dropped" in row.record.notes}
        is_slow = slow & {plan.part(name).name for name in plan.values}
        is_wrong = any(other.values.items() <= plan.values.items() for other in self.refused)
        return not (plan.name in self.tried or is_slow or is_wrong)

    def best(self) -> TimedPlan | None:
        """Return the best of the plans that may help, or of all; of equals the smallest."""
        rows = {frozenset(row.name.split("+")): row for row in self.rows()}
        refused = [parts for parts, row in rows.items() if is_out(row.comparison, row.record)]
        timed = [
            row
            for parts, row in rows.items()
            if row.ratio.pairs and not any(other <= parts for other in refused)
        ]
        able = [row for row in timed if row.is_likely] or timed
        most = max((row.ratio.median for row in able), default=0.0)
        equal = [row for row in able if row.ratio.median * (1 + SAME) >= most]
        return min(equal, key=lambda row: row.name.count("+"), default=None)

    # --- the plans to try next ---

    def best_first(
        self,
        warm: Collection[str],
        plan: Candidate,
        others: Iterable[Candidate],
        least: float = 0.0,
    ) -> list[Candidate]:
        """Return the others by the speed that they promise compared with the plan, best first.

        The promise is the measured ratio, or the product of the gains of the parts in which the two
        differ. Plans that promise less than `least` are left out, as are plans that are not `warm`
        and have to be compiled, where the plan is compiled or they promise no gain.
        """
        speedups, gains = self._speedups(), self.gains_of_parts()

        def gain(one: Candidate, other: Candidate) -> float:
            names = [name for name in one.values if other.values.get(name) != one.values[name]]
            return math.prod(gains.get(one.part(name).name, 1.0) for name in names)

        def promised(one: Candidate) -> float:
            now, then = speedups.get(plan.name), speedups.get(one.name)
            return then / now if now and then else gain(one, plan) / gain(plan, one)

        def is_quick(one: Candidate) -> bool:
            promises = promised(one)
            may_compile = promises >= WORTH_IT and not plan.costly
            return promises >= least and (not one.costly or one.name in warm or may_compile)

        return sorted(filter(is_quick, others), key=promised, reverse=True)

    def rivals(self) -> list[Candidate]:
        """Return the two best plans of the races, and the plans of BY_HAND."""
        speedups = self._speedups()
        able = {name: plan for name, plan in self.tried.items() if speedups.get(name, 0.0) > 1}

        def gain(name: str) -> float:  # a compiled plan has to lead by as much as compiling costs
            return speedups[name] / (WORTH_IT if able[name].costly else 1)

        best = sorted(able, key=gain, reverse=True)[:2]
        by_hand = [name for name, plan in able.items() if plan.without(ALWAYS).name in BY_HAND]
        return [able[name] for name in dict.fromkeys([*best, *by_hand])]

    def gains_of_parts(self) -> dict[str, float]:
        """Return the median factor by which each part made plans faster, by the part's word."""
        speedups, found = self._speedups(), dict[str, list[float]]()
        for plan in self.tried.values():
            for name in plan.values:
                rest = plan.without(name)
                usual = 0.0 if rest.values.keys() - {ALWAYS} else 1.0
                before, after = speedups.get(rest.name, usual), speedups.get(plan.name)
                if before and after:
                    found.setdefault(plan.part(name).name, []).append(after / before)
        return {word: median(gains) for word, gains in found.items()}

    def _speedups(self) -> dict[str, float]:
        return {row.name: row.ratio.median for row in self.rows()}
