"""The gain of a plan and of each of its parts, and the reason not to take a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from speedkit_jupyter import catalog as optimizations
from speedkit_jupyter.rounds.comparison import LOAD_DECIDES, Comparison
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.rounds.statistics import SAME, Ratio, bonferroni_share
from speedkit_jupyter.search.candidates import BASELINE, LOWERING, Candidate

# A plan that is this many times slower while warming up is not timed.
FAR_SLOWER = 3.0
# In fewer rounds than these no plan leaves a race, is called far slower, or is likely: of three
# rounds one may be disturbed.
FEW_ROUNDS = 3
# A plan whose upper bound is below this has nothing to gain.
LIKELY = 1.05
# A part that lowers precision, or compiles for seconds at every start, has to bring this much.
WORTH_IT = 1.02
# A plan that lost a race by no more than this is proven or refuted with more rounds, since the
# median of three rounds is off by some 2 %, and so is the one that it lost to.
NARROW = 0.93
# An interval of this share of the median to both sides is measured well: other processes differ by
# more, and a choice by it is wrong by a third of that at most.
PRECISE_PART = 0.05


def gain_of(
    comparison: Comparison, record: Record, proven: bool = False, checked: bool = True
) -> float:
    """Return how many times as fast a variant is; 0 where it must not be chosen.

    With `proven` its interval must prove it, and with `checked` its results must be right.
    """
    ratio = comparison.ratio(record)
    if ratio is None or record.same_as_baseline or is_out(comparison, record):
        return 0.0
    if proven and checked and record.accuracy is None:
        return 0.0
    fell_behind = len(record.times_s) < len(comparison.baseline.times_s)
    is_unproven = proven and comparison.verdict(record) != "faster"
    return 0.0 if fell_behind or is_unproven else ratio.median


def why_not(comparison: Comparison, record: Record, best: str) -> str:
    """Return why a variant is not the plan, with its number; `best` is the plan's name."""
    baseline, ratio = comparison.baseline, comparison.ratio(record)
    verdict = comparison.verdict(record)
    if record.failure:
        return f"{verdict}: {record.failure}"
    if record.same_as_baseline:
        return "changes nothing here"
    if record.is_other_model(baseline):
        return "another model: speed alone does not decide about it"
    if record.accuracy is not None and is_out(comparison, record):
        return f"{record.accuracy.verdict}: {record.accuracy.reason}"
    if ratio is None:
        return record.why_not_measured or "not measured"
    if comparison.load_decides(baseline, record):
        return f"{LOAD_DECIDES}: {ratio}"
    if verdict == "faster":
        return f"helps: {ratio}; {best} is as good or better"
    if verdict == "slower" or is_behind(baseline.times_s, record.times_s, 1.0):
        return f"slower: {ratio}"
    if len(record.times_s) < len(baseline.times_s):
        return f"slower than the best, dropped: {ratio}"
    return f"not proven faster: {ratio}"


def is_out(comparison: Comparison, record: Record) -> bool:
    """Return whether a variant can't be the plan, however fast."""
    refused = comparison.verdict(record) in ("failed", "declined", "wrong")
    return refused or not record.is_checked or record.is_other_model(comparison.baseline)


def is_behind(
    baseline_s: Sequence[float], times_s: Sequence[float], times: float, rounds: int = FEW_ROUNDS
) -> bool:
    """Return whether each of at least `rounds` rounds was `times` slower than the baseline's."""
    pairs = list(zip(baseline_s, times_s, strict=False))
    return len(pairs) >= rounds and all(slow > times * base for base, slow in pairs)


def row_of(comparison: Comparison, plan: Candidate) -> Record:
    """Return the record of a plan, which must be in the comparison."""
    return next(record for record in comparison.records if record.name == plan.name)


class PlanPart(NamedTuple):
    """One optimization of a plan; `ratio` is the plan's speed with it over the speed without."""

    name: str
    word: str
    ratio: Ratio

    @property
    def is_proven(self) -> bool:
        """Whether leaving it out is slower, by at least what the part has to bring."""
        return self.ratio.verdict == "faster" and self.ratio.median >= least(self.name)

    @property
    def is_clear(self) -> bool:
        """Whether more rounds would change nothing: proven, worth too little, or measured well."""
        is_too_little = self.ratio.high < least(self.name)
        return self.is_proven or is_too_little or self.ratio.is_precise(PRECISE_PART)


def least(name: str) -> float:
    return WORTH_IT if name in LOWERING or optimizations.named(name).costly else 1 + SAME


def parts_of(whole: Candidate, comparison: Comparison) -> list[PlanPart]:
    """Return each part of the plan that was measured: with it against without it."""
    error = bonferroni_share(comparison.error, 2 * len(whole.values))
    records = {record.name: record for record in comparison.records if not record.failure}
    after, parts = records.get(whole.name), []
    for name in whole.values:
        before = records.get(whole.without(name).name)
        if before and after and (ratio := comparison.compared(before, after, error)):
            parts.append(PlanPart(name, whole.part(name).name, ratio))
    return parts


def _pays(plan: Candidate, gains: Mapping[str, float], others: Sequence[Candidate]) -> bool:
    """Return whether a plan leads each plan without some of its parts by the least of these."""
    return all(
        gains[plan.name] > gains[other.name] * max(map(least, plan.values.keys() - other.values))
        for other in others
        if other.values.items() < plan.values.items()
    )


def leader(plans: Sequence[Candidate], gains: Mapping[str, float]) -> Candidate:
    """Return the plan of the highest gain whose parts pay; of equals the first, or the smallest."""
    able = [plan for plan in plans if _pays(plan, gains, plans)]
    most = max(gains[plan.name] for plan in able)
    equal = [plan for plan in able if gains[plan.name] * (1 + SAME) >= most]
    return plans[0] if plans[0] in equal else min(equal, key=lambda plan: len(plan.values))


def best_of(comparison: Comparison, asked: Sequence[Candidate]) -> Candidate:
    """Return the plan that leads a race, or lost it narrowly; BASELINE without one.

    A compiled plan has to lead by more than a few rounds are off.
    """
    gains = {plan.name: gain_of(comparison, row_of(comparison, plan)) for plan in asked}
    plain = max([1.0, *(gains[plan.name] for plan in asked if not plan.costly)])
    for plan in asked:
        if gains[plan.name] <= (plain / NARROW if plan.costly else NARROW):
            gains[plan.name] = 0.0
    best = leader(asked, gains)
    return best if gains[best.name] else BASELINE
