"""Keep the plans that a search has tried, with their gains, and choose the plans to try next."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from speedkit_jupyter.rounds.comparison import DROPPED, LOAD_DECIDES, Comparison, Record
from speedkit_jupyter.rounds.statistics import SAME, TICK_S, Ratio
from speedkit_jupyter.search import thresholds
from speedkit_jupyter.search.candidates import ALWAYS, Candidate
from speedkit_jupyter.support.units import WIDE, count, ratio, seconds


class Stage(NamedTuple):
    """One benchmark of a search, with its title in progress texts and JSON."""

    title: str
    comparison: Comparison


@dataclass(frozen=True)
class TimedPlan:
    """A plan's times, in a comparison that also has the baseline's times.

    | property | condition | consequence |
    | --- | --- | --- |
    | `is_refused` | failed, declined, wrong, "not checked", or another model | it cannot win |
    | `cannot_win` | it is refused, or the same as the baseline | its `ratio` is 0 |
    | `is_vague` | a wide range, or other programs' load decides | no speed-up is reported |
    | `is_undecided` | it can win, but rounds are few or vague | the search may be unclear |
    | `is_likely` | enough rounds show a gain | without a proof, it may be the likely plan |
    """

    comparison: Comparison
    record: Record

    @classmethod
    def of(cls, comparison: Comparison, plan: Candidate) -> TimedPlan:
        """Return the times of a plan in a comparison."""
        return cls(comparison, next(one for one in comparison.records if one.name == plan.name))

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def is_refused(self) -> bool:
        """Return whether the plan failed, was declined, is wrong, unchecked or another model."""
        is_other = self.record.is_other_model(self.comparison.baseline)
        verdict = self.comparison.verdict(self.record)
        return verdict in ("failed", "declined", "wrong") or not self.record.is_checked or is_other

    @property
    def cannot_win(self) -> bool:
        """Return whether the plan is refused, or the same as the baseline."""
        return self.record.same_as_baseline or self.is_refused

    @property
    def ratio(self) -> Ratio:
        """Return the speed-up; 0 if it is unknown, or the plan cannot win."""
        found = None if self.cannot_win else self.comparison.ratio(self.record)
        return found or Ratio(0.0, 0.0, 0.0, 0)

    def gain(self, proven: bool = False, checked: bool = True) -> float:
        """Return the speed-up; 0 if the plan must not be chosen: it cannot win or was dropped.

        If `proven`, the verdict must be "faster"; if also `checked`, the results must be checked.
        """
        was_dropped = len(self.record.times_s) < len(self.comparison.baseline.times_s)
        is_unproven = proven and self.comparison.verdict(self.record) != "faster"
        is_unchecked = proven and checked and self.record.accuracy is None
        return 0.0 if was_dropped or is_unproven or is_unchecked else self.ratio.median

    @property
    def range(self) -> tuple[float, float]:
        """Return the ends of the speed-up's interval or, if unbounded, of its range over rounds."""
        if self.ratio.is_bounded:
            return self.ratio.low, self.ratio.high
        pairs = zip(self.comparison.baseline.times_s, self.record.times_s, strict=False)
        ratios = [before / max(now, TICK_S) for before, now in pairs]
        return min(ratios), max(ratios)

    @property
    def is_vague(self) -> bool:
        """Return whether the rounds decide nothing: their range is wide, or the load decides."""
        (low, high), baseline = self.range, self.comparison.baseline
        return high > WIDE * low or self.comparison.load_decides(baseline, self.record)

    @property
    def is_undecided(self) -> bool:
        """Return whether the plan can win, but its rounds are few or vague; False if far slower."""
        is_slow = "far slower" in self.record.notes.get("left out", "")
        enough = thresholds.FEW_ROUNDS if self.comparison.busy else 1
        has_few = self.ratio.pairs < enough or self.is_vague
        return has_few and not self.cannot_win and not is_slow

    @property
    def is_likely(self) -> bool:
        """Return whether enough rounds show a gain that may matter, within the user's limit."""
        has_enough = self.ratio.pairs >= thresholds.FEW_ROUNDS and not self.is_vague
        is_worth_it = self.ratio.median >= thresholds.LEAST_COSTLY_PART_GAIN
        is_faster = is_worth_it and self.range[1] >= thresholds.LEAST_WORTH_FINDING
        if not self.ratio.is_bounded:  # too few rounds for an interval
            is_faster &= self.range[0] > 1
        return has_enough and is_faster and not self.above_limit

    @property
    def above_limit(self) -> str:
        """Return a text if the 99th percentile is above the user's limit; else empty."""
        return self.comparison.exceeds(self.record)

    def told(self, how: str = "") -> str:
        """Return `bf16 is {how}1.90× as fast (1.40× to 2.60× in 6 rounds)`, or "too noisy"."""
        low, high = map(ratio, self.range)
        rounds = count(self.ratio.pairs, "round")
        if self.is_vague:
            return f"{self.name}, too noisy to tell after {rounds}"
        spread = f"{low} to {high} " if self.ratio.pairs > 1 else ""
        return f"{self.name} is {how}{ratio(self.ratio.median)} as fast ({spread}in {rounds})"

    def why_not(self, best: str) -> str:
        """Return the reason against the plan, with its speed; `best` names the chosen plan."""
        comparison, record, found = self.comparison, self.record, self.comparison.ratio(self.record)
        baseline, verdict = comparison.baseline, comparison.verdict(record)
        if record.failure:
            return f"{verdict}: {record.failure}"
        if record.same_as_baseline:
            return "changes nothing here"
        if record.is_other_model(baseline):
            return "another model: speed alone does not decide about it"
        if record.accuracy is not None and self.is_refused:
            return f"{record.accuracy.verdict}: {record.accuracy.reason}"
        if verdict == "above the limit":
            return f"{verdict}: {self.above_limit}"
        if found is None:
            return record.why_not_measured or "not measured"
        if comparison.load_decides(baseline, record):
            return f"{LOAD_DECIDES}: {found}"
        if verdict == "faster":
            return f"helps: {found}; {best} is as good or better"
        pairs = list(zip(baseline.times_s, record.times_s, strict=False))
        has_enough = len(pairs) >= thresholds.FEW_ROUNDS
        is_always_slower = has_enough and all(now > before for before, now in pairs)
        if verdict == "slower" or is_always_slower:
            return f"slower: {found}"
        if len(record.times_s) < len(baseline.times_s):
            return f"{DROPPED}: {found}"
        return f"not proven faster: {found}"


@dataclass
class TriedPlans:
    """The plans of a search by name, with the `stages` that timed them.

    `raced` has the names of plans that must not race again. `refused` has the plans that a proof
    refused; plans that contain all of their parts are not tried. `reasons` says why plans were
    rejected or left out.
    """

    stages: list[Stage] = field(default_factory=list)
    plans: dict[str, Candidate] = field(default_factory=dict)
    raced: set[str] = field(default_factory=set)
    refused: list[Candidate] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[TimedPlan]:
        """Return each plan's newest times or failure; 1 or 2 rounds don't replace more rounds."""
        rows: dict[str, TimedPlan] = {}
        for comparison in (stage.comparison for stage in self.stages):
            for record in comparison.records[1:]:
                known = rows.get(record.name)
                least = min(len(known.record.times_s), thresholds.FEW_ROUNDS) if known else 0
                if known is None or record.failure or len(record.times_s) >= max(least, 1):
                    rows[record.name] = TimedPlan(comparison, record)
        return list(rows.values())

    def add(self, plans: Sequence[Candidate]) -> None:
        """Record plans that are about to be timed."""
        self.plans |= {plan.name: plan for plan in plans}
        self.raced |= {plan.name for plan in plans}

    def row_of(self, plan: Candidate) -> TimedPlan | None:
        """Return the newest times of a plan; None if it was in no benchmark."""
        return next((row for row in self.rows() if row.name == plan.name), None)

    def set_reason(self, name: str, reason: str) -> None:
        """Set the reason against a plan, as the last entry of `reasons`."""
        self.reasons.pop(name, None)
        self.reasons[name] = reason

    def why_unclear(self, step_s: float, waiting: Sequence[Candidate] = ()) -> str:
        """Return why the search has no answer; empty if neither time nor rounds were lacking."""
        rows = self.rows()
        if not rows and (self.plans or waiting):
            return f"one step takes {seconds(step_s)}"
        if waiting:
            return f"{count(len(waiting), 'plan')} had no time"
        is_open = 2 * sum(row.is_undecided for row in rows) > len(rows)
        return "too few undisturbed rounds for most of the plans" if is_open else ""

    def is_new(self, plan: Candidate) -> bool:
        """Return whether a plan is not in `raced`, and contains no refused plan or slow part."""
        slow = {row.name for row in self.rows() if "dropped" in row.record.notes}
        is_slow = slow & {plan.part(name).name for name in plan.values}
        return not (plan.name in self.raced or is_slow or self._is_refused(plan))

    def _is_refused(self, plan: Candidate) -> bool:
        return any(other.values.items() <= plan.values.items() for other in self.refused)

    def best(self) -> TimedPlan | None:
        """Return the fastest plan not refused, or None; prefer likely plans, then few parts."""
        timed = [row for row in self.rows() if row.ratio.pairs]
        timed = [row for row in timed if not self._is_refused(self.plans[row.name])]
        able = [row for row in timed if row.is_likely] or timed
        most = max((row.ratio.median for row in able), default=0.0)
        equal = [row for row in able if row.ratio.median * (1 + SAME) >= most]
        return min(equal, key=lambda row: row.name.count("+"), default=None)

    def best_first(
        self,
        plan: Candidate,
        others: Iterable[Candidate],
        least: float = 0.0,
        compiles: bool = False,
    ) -> list[Candidate]:
        """Return the promising plans of `others`, the plan with the best expected speed first.

        The speed is relative to `plan`: measured, or estimated from the gains of the parts that
        differ. Plans below `least` are left out. New compiled plans also need an expected gain; if
        `plan` is compiled, they need `compiles`, and a chance to be the best.
        """
        speedups, gains, own = self._speedups(), self.gains_of_parts(), set(plan.name.split("+"))

        def promised(one: Candidate) -> float:
            now, then, words = speedups.get(plan.name), speedups.get(one.name), one.name.split("+")
            if now and then:
                return then / now
            lost = math.prod(gains.get(word, 1.0) for word in own.difference(words))
            return math.prod(gains.get(word, 1.0) for word in words if word not in own) / lost

        def is_worth_it(one: Candidate) -> bool:
            if not one.costly or one.name in self.raced:
                return promised(one) >= least
            if plan.costly:
                return compiles and promised(one) >= thresholds.MAY_BE_BEST
            return promised(one) >= max(least, thresholds.LEAST_COSTLY_PART_GAIN)

        return sorted(filter(is_worth_it, others), key=promised, reverse=True)

    def rivals(self) -> list[Candidate]:
        """Return up to two plans with the largest speed-ups above 1; the best is last."""
        speedups = self._speedups()
        able = [name for name in self.plans if speedups.get(name, 0.0) > 1]
        return [self.plans[name] for name in sorted(able, key=speedups.__getitem__)[-2:]]

    def gains_of_parts(self) -> dict[str, float]:
        """Return the median speed-up that each part brings to plans, by the part's name."""
        speedups, found = self._speedups(), dict[str, list[float]]()
        for plan in self.plans.values():
            for name in plan.values:
                rest = plan.without(name)
                usual = 0.0 if rest.values.keys() - {ALWAYS} else 1.0
                before, after = speedups.get(rest.name, usual), speedups.get(plan.name)
                if before and after:
                    found.setdefault(plan.part(name).name, []).append(after / before)
        return {word: median(gains) for word, gains in found.items()}

    def _speedups(self) -> dict[str, float]:
        return {row.name: row.ratio.median for row in self.rows()}
