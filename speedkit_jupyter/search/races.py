"""Decide how long plans are timed in races and proofs, and which plan leads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from speedkit_jupyter import catalog as optimizations
from speedkit_jupyter.rounds import budget, statistics
from speedkit_jupyter.rounds.budget import DEFAULT_BUDGET_S
from speedkit_jupyter.rounds.comparison import Comparison, Record
from speedkit_jupyter.rounds.sampler import BLOCK_STEPS, LONG_S, Policy
from speedkit_jupyter.rounds.shuffled_rounds import BLOCK_S
from speedkit_jupyter.rounds.statistics import SAME, Ratio
from speedkit_jupyter.search import thresholds
from speedkit_jupyter.search.candidates import BASELINE, LOWERING, Candidate
from speedkit_jupyter.search.tried_plans import TimedPlan


class PlanRace(Policy):
    """Choose the fastest plan by dropping clearly slower plans, without a proof or checks."""

    most_times_slower = thresholds.MOST_TIMES_SLOWER
    checked, deciding_rounds, measures_memory = 0, thresholds.FEW_ROUNDS, False

    def __init__(self, budget: SearchBudget) -> None:
        self._budget = budget

    @property
    def rounds_s(self) -> float:
        return self._budget.race_s

    def staying(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """Return the baseline and possible leaders; empty if the race is decided or long enough."""
        gone = {row.name for row in clearly_slower(racing)}
        staying = [racing[0], *(row for row in racing[1:] if row.name not in gone)]
        is_decided = len(staying) == 1 < len(racing)
        is_decided |= len(staying) <= 2 and not _is_early(staying)
        has_enough = len(racing[0].times_s) >= 2 * thresholds.FEW_ROUNDS
        return () if is_decided or has_enough else staying


def _is_early(records: Sequence[Record]) -> bool:
    """Return whether the rounds are too few, or took too little time, to drop a plan."""
    rounds = len(records[0].times_s)
    raced_s = sum(sum(record.times_s) for record in records)
    few = thresholds.FEW_ROUNDS
    return rounds < few or (raced_s < thresholds.LEAST_RACE_S and rounds < 2 * few)


def clearly_slower(records: Sequence[Record]) -> list[Record]:
    """Return the records that are clearly slower than the fastest; none if rounds are too few.

    Times are compared within rounds. Delayed rounds don't count if there are enough other rounds.
    """
    if _is_early(records):
        return []
    logs = np.log(np.array([record.times_s for record in records]))
    delayed = np.array([any(row) for row in zip(*(r.interrupted for r in records), strict=False)])
    if len(delayed) == logs.shape[1] and (~delayed).sum() >= thresholds.FEW_ROUNDS:
        logs = logs[:, ~delayed]
    behind = logs - logs[np.argmin(np.median(logs, axis=1))]
    medians = np.median(behind, axis=1)
    deviations = np.median(np.abs(behind - medians[:, None]), axis=1)[medians > 0]
    # Three rounds may agree by chance, so the scatter counts as at least half a percent.
    scatter = max(1.48 * float(np.median(deviations)) if len(deviations) else 0.0, SAME / 2)
    margin = max(thresholds.CLEAR_ERRORS * 1.25 * scatter / logs.shape[1] ** 0.5, SAME)
    margin = min(margin, math.log(thresholds.CLEARLY_SLOWER))
    return [record for record, lag in zip(records, medians, strict=True) if lag > margin]


def leader_of_race(comparison: Comparison, plans: Sequence[Candidate]) -> Candidate:
    """Return the fastest plan of a race if it may be faster than the baseline; else BASELINE.

    A compiled plan must be over 1 / MAY_BE_BEST times as fast as uncompiled plans and the baseline.
    """
    gains = {plan.name: TimedPlan.of(comparison, plan).gain() for plan in plans}
    plain = max([1.0, *(gains[plan.name] for plan in plans if not plan.costly)])
    least = thresholds.MAY_BE_BEST
    for plan in plans:
        if gains[plan.name] <= (plain / least if plan.costly else least):
            gains[plan.name] = 0.0
    best = leader(plans, gains)
    return best if gains[best.name] else BASELINE


def leader(plans: Sequence[Candidate], gains: Mapping[str, float]) -> Candidate:
    """Return the plan with the highest gain among the plans whose parts gain enough.

    If a plan lacks some of another plan's parts, the larger plan must be faster by the largest
    `least_gain` of these parts. If gains are within SAME, prefer `plans[0]`, then fewer parts.
    """

    def pays(plan: Candidate) -> bool:
        smaller = [other for other in plans if other.values.items() < plan.values.items()]
        more = {other.name: plan.values.keys() - other.values for other in smaller}
        least = (gains[name] * max(map(least_gain, parts)) for name, parts in more.items())
        return all(gains[plan.name] > gain for gain in least)

    able = list(filter(pays, plans))
    most = max(gains[plan.name] for plan in able)
    equal = [plan for plan in able if gains[plan.name] * (1 + SAME) >= most]
    return plans[0] if plans[0] in equal else min(equal, key=lambda plan: len(plan.values))


def least_gain(name: str) -> float:
    """Return the speed-up that a part must at least bring to its plan."""

    is_costly = name in LOWERING or optimizations.named(name).costly
    return thresholds.LEAST_COSTLY_PART_GAIN if is_costly else thresholds.LEAST_PART_GAIN


# --- the proof ---


class PlanPart(NamedTuple):
    """One optimization of a plan, its `word` in plan names, and the speed-up that it adds."""

    name: str
    word: str
    ratio: Ratio

    @property
    def is_proven(self) -> bool:
        """Return whether the part is proven to help, and its median gain is large enough."""
        return self.ratio.verdict == "faster" and self.ratio.median >= least_gain(self.name)

    @property
    def is_clear(self) -> bool:
        """Return whether the part is decided: proven, refuted, or measured precisely."""
        is_too_little = self.ratio.high < least_gain(self.name)
        return self.is_proven or is_too_little or self.ratio.is_precise(thresholds.PRECISE_PART)


def parts_of(whole: Candidate, comparison: Comparison) -> list[PlanPart]:
    """Return the parts whose removal was timed, each with the speed-up that it adds to the plan."""
    error = statistics.bonferroni_share(comparison.error, 2 * len(whole.values))
    records = {record.name: record for record in comparison.records if not record.failure}
    after, parts = records.get(whole.name), []
    for name in whole.values:
        before = records.get(whole.without(name).name)
        if before and after and (ratio := comparison.compared(before, after, error)):
            parts.append(PlanPart(name, whole.part(name).name, ratio))
    return parts


def proven_gains(rows: Mapping[str, TimedPlan], checked: bool = True) -> dict[str, float]:
    """Return each plan's proven speed-up; 0 if dropped, unproven or, if `checked`, unchecked.

    If the first plan is proven, other plans are compared with it, without the baseline's noise.
    """
    gains = {name: row.gain(proven=True, checked=checked) for name, row in rows.items()}
    whole = next(iter(rows.values()))
    for name, row in rows.items():
        pair = whole.comparison.compared(row.record, whole.record, statistics.ERROR)
        if pair and gains[name] and gains[whole.name]:
            gains[name] = gains[whole.name] / pair.median
    return gains


def _may_matter(comparison: Comparison, one: Record, other: Record) -> bool:
    """Return whether it is open which plan is faster, and the difference may be worth finding."""
    found = comparison.compared(one, other, 2 * statistics.ERROR)  # ERROR on each side
    if found is None or not found.low <= 1 <= found.high:
        return False
    return max(found.high, 1 / max(found.low, statistics.TICK_S)) >= thresholds.LEAST_WORTH_FINDING


class Proof(Policy):
    """Time plans until the first plan's ratio is precise, and its rivals and parts are decided.

    Rivals are dropped once they are clearly slower. A plan that lacks one part is dropped once that
    part is proven; if steps are long, it is treated as a rival, too. Unclear plans are timed for
    MOST_UNCLEAR_ROUNDS rounds, or longer if they may matter and enough of the budget is left. Then
    the results of proven plans are checked, the best plan first, until one passes.
    """

    proves, checked, measures_memory = True, 2, False

    def __init__(self, plans: Sequence[Candidate], budget: SearchBudget) -> None:
        self._plans, self._whole, self._budget = plans, plans[0], budget
        parts = () if budget.steps_are_long else plans[0].without_each()
        self._staying = {plans[0].name, *(plan.name for plan in parts)}

    def staying(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """Return the records without clearly slower rivals; empty if the proof is over.

        Planned tests also drop plans that lack a proven part, and a first plan that gains nothing.
        """
        if self._is_over(racing, comparison):
            return ()
        gone = {row.name for row in clearly_slower(racing)} - self._staying
        whole = next((row for row in racing if row.name == self._whole.name), None)
        if comparison and whole:
            parts = [part for part in parts_of(self._whole, comparison) if part.is_proven]
            gone |= {self._whole.without(part.name).name for part in parts}
            ratio = comparison.ratio(whole)
            if ratio and ratio.median <= 1 and ratio.pairs >= statistics.LEAST_PAIRS:
                gone.add(whole.name)
        staying = [racing[0], *(row for row in racing[1:] if row.name not in gone)]
        return () if self._is_over(staying, comparison) else staying

    def _is_over(self, racing: Sequence[Record], comparison: Comparison | None) -> bool:
        """Return whether the plans are decided, the first can't gain enough, or none is left."""
        others = {row.name: row for row in racing[1:]}
        if comparison is None or not others:
            return not others
        if (whole := others.get(self._whole.name)) is None:
            return self.are_settled(racing, comparison)
        ratio = comparison.ratio(whole)
        if ratio is None or ratio.verdict == "too noisy":
            return ratio is not None and ratio.high < thresholds.LEAST_WORTH_FINDING
        has_enough = len(racing[0].times_s) >= thresholds.MOST_UNCLEAR_ROUNDS
        if self._budget.left_s > thresholds.UNCLEAR_SHARE * self._budget.seconds:
            has_enough &= not any(_may_matter(comparison, whole, others[name]) for name in others)
        rivals = others.keys() - self._staying
        parts = parts_of(self._whole, comparison)
        open_parts = [part for part in parts if self._whole.without(part.name).name in others]
        is_clear = not rivals and all(part.is_clear for part in open_parts)
        of_processes = statistics.NORMAL * statistics.PROCESSES * math.log(max(ratio.median, 1))
        precise = max(thresholds.PRECISE_PLAN, of_processes)
        return (is_clear or has_enough) and ratio.is_precise(precise * (1 + has_enough))

    def to_check(self, comparison: Comparison) -> Iterator[Record]:
        """Yield the records of proven plans, the best first, until one plan passes its check."""
        timed = {plan.name: TimedPlan.of(comparison, plan) for plan in self._plans}
        gains = proven_gains(timed, checked=False)
        while gains[(best := leader(self._plans, gains)).name] > 1:
            yield timed[best.name].record
            if timed[best.name].gain(proven=True) > 1:
                return
            gains[best.name] = 0.0


# --- the time ---


class SearchBudget(budget.Budget):
    """The budget of a search: `budget_s`, or a default that grows with the step's duration.

    `step_s` is the median time of a step in seconds; 0 until a step is timed.
    """

    def __init__(
        self,
        budget_s: float | None,
        begun_s: float | None = None,
        now: Callable[[], float] | None = None,
        reserved_s: float = 0.0,
    ) -> None:
        seconds = budget_s or DEFAULT_BUDGET_S
        super().__init__(seconds, now, begun_s=begun_s, reserved_s=reserved_s)
        self.step_s, self._enough_s, self._grows, self._times = 0.0, 0.0, budget_s is None, 1.0

    def follow(self, times_s: Sequence[float] = (), is_busy: bool = False) -> None:
        """Set `step_s`; extend a default budget to ENOUGH_STEPS steps, twice that if `is_busy`."""
        self._times = 2.0 if is_busy else self._times
        if times_s:
            self.step_s = median(times_s)
            self._enough_s = thresholds.ENOUGH_STEPS * (min(times_s) if is_busy else self.step_s)
        if self._grows:
            enough_s = self._times * max(DEFAULT_BUDGET_S, self._enough_s)
            self.seconds = max(self.seconds, min(enough_s, thresholds.MOST_GROWN_S))

    @property
    def proof_s(self) -> float:
        """Return the estimated seconds of proving and checking one plan."""
        steps = 1 if self.step_s >= LONG_S else 1 + BLOCK_STEPS
        round_s = (1 + thresholds.PLAN_SHARE) * max(steps * self.step_s, BLOCK_S)
        check_s = budget.CHECK_S + budget.CHECK_STEPS * self.step_s
        return check_s + thresholds.ENOUGH_ROUNDS * round_s

    @property
    def steps_are_long(self) -> bool:
        """Return whether three proofs would exceed the budget; then not all parts are proven."""
        return 3 * self.proof_s > self.seconds

    def room(self) -> int:
        """Return the number of candidates that fit into a race, in addition to the baseline."""
        least_s = 2 * BLOCK_S * thresholds.FEW_ROUNDS
        candidate_s = max(self.proof_s * thresholds.CANDIDATE_SHARE, least_s)
        return max(min(int(self.race_s / candidate_s), thresholds.MOST_CANDIDATES), 0)

    @property
    def race_s(self) -> float:
        """Return the seconds that a race may take, so that enough is left for a proof."""
        # 1.3 allows for overhead between blocks of a proof, and for other programs.
        left_s = self.left_s - max(1.3 * self.proof_s, thresholds.PROOF_SHARE * self.seconds)
        return min(thresholds.RACE_SHARE * self.seconds, max(left_s, 0.0))
