"""How much better a candidate is, and why it was not taken."""

from __future__ import annotations

from dataclasses import dataclass

from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.results.statistics import LEAST_PAIRS, Ratio, spread
from speedkit_jupyter.tuning.policies import (
    LEAST_SAVED,
    RACE_ROUNDS,
    WORTH_IT,
    costs_too_much,
    is_behind,
    memory_saved,
)


@dataclass(frozen=True)
class Aim:
    """What a search is for: less time of a step, of so many `steps` with compiling, or of `memory`
    that may take `within` times the time.
    """

    memory: bool = False
    within: float | None = None
    steps: int | None = None

    def score(self, comparison: Comparison, record: Record) -> float:
        """Return how many times better it is proven to be, and right; 0 where it is not."""
        if _is_out(comparison, record) or not record.is_checked or record.accuracy is None:
            return 0.0
        ratio = comparison.ratio(record)
        if self.memory:
            low = 0.0 if ratio is None else ratio.low
            return self._saved(comparison, record) if self._is_within(low) else 0.0
        if ratio is None or comparison.verdict(record) != "faster":
            return 0.0
        return self._in_all(comparison, record, ratio.median)

    def value(self, comparison: Comparison, record: Record) -> float:
        """Return how many times better it looks, to choose by; 0 where it must not be chosen."""
        if record is comparison.baseline:
            return 1.0
        ratio = comparison.ratio(record)
        if _is_out(comparison, record) or not record.is_checked or ratio is None:
            return 0.0
        if self.memory:
            return self._saved(comparison, record) if self._is_within(ratio.median) else 0.0
        fell_behind = len(record.times_s) < len(comparison.baseline.times_s)
        return 0.0 if fell_behind else self._in_all(comparison, record, ratio.median)

    def _is_within(self, speedup: float) -> bool:
        return self.within is None or speedup * self.within >= 1

    def _saved(self, comparison: Comparison, record: Record) -> float:
        saved = memory_saved(comparison.baseline, record)
        is_worth_it = saved > 1 + LEAST_SAVED and not costs_too_much(comparison.baseline, record)
        return saved if is_worth_it else 0.0

    def _in_all(self, comparison: Comparison, record: Record, speedup: float) -> float:
        """The same over all the steps, what compiling takes included."""
        if self.steps is None:
            return speedup
        before = comparison.baseline
        steps_s = self.steps * spread(before.times_s).median_s
        compiling_s = before.settling_s if before.is_compiled else 0.0
        return (compiling_s + steps_s) / (record.settling_s + steps_s / speedup)

    def why_not(self, comparison: Comparison, record: Record, best: str) -> str:
        """Return why it is not in the plan, with its number."""
        if reason := _not_right(comparison, record):
            return reason
        ratio = comparison.ratio(record)
        if self.memory and (reason := self._memory_reason(comparison, record, ratio, best)):
            return reason
        if ratio is None:
            return record.why_not_measured or "not measured"
        if not ratio.is_bounded:
            return _unbounded(comparison, record, ratio, best)
        number = str(ratio)
        if comparison.baseline.applied:
            number += f" against {comparison.baseline.name}"
        verdict = comparison.verdict(record)
        if verdict == "faster":
            return f"helps ({number}), {best} {_beside(comparison, record, best)}"
        if verdict == "too noisy" and ratio.high < WORTH_IT:
            return f"gains less than {WORTH_IT - 1:.0%}: {number}"
        return f"not proven faster: {number}" if verdict == "too noisy" else f"{verdict}: {number}"

    def _memory_reason(
        self, comparison: Comparison, record: Record, ratio: Ratio | None, best: str
    ) -> str:
        """By the memory that it saves, or the time that it takes for it; empty for neither."""
        share = _share(comparison, record)
        if ratio is not None and not self._is_within(ratio.low):
            saves = f"its peak is {share} of {comparison.baseline.name}'s, but " if share else ""
            time = f"{1 / ratio.median:.2f} times the time"
            if self._is_within(ratio.median):
                most = f"{self.within:g} times the time at most"
                return f"{saves}not proven to take {most}: {time} in the middle"
            return f"{saves}it takes {time}, more than {self.within:g}"
        if not share or costs_too_much(comparison.baseline, record):
            return ""
        leads = next((row for row in comparison.records[1:] if row.name == best), None)
        beside = f", {best} {_share(comparison, leads)}" if leads is not None else ""
        if not record.is_checked:
            beside = ", but there was no time to check what it computes"
        return f"its peak is {share} of {comparison.baseline.name}'s{beside}"


def _is_out(comparison: Comparison, record: Record) -> bool:
    """Whether it can't be the plan, however fast."""
    is_other = record.is_other_model(comparison.baseline)
    wrong = comparison.verdict(record) in ("failed", "declined", "wrong")
    return wrong or is_other or record.same_as_baseline


def _not_right(comparison: Comparison, record: Record) -> str:
    """Why no speed counts; empty where it does."""
    verdict, score = comparison.verdict(record), record.score
    if record.failure:
        return f"{verdict}: {record.failure}"
    if verdict == "wrong" and record.accuracy is not None:
        return f"wrong: {record.accuracy.reason}"
    if record.same_as_baseline:
        return "changes nothing here"
    if score is not None and record.is_refused:
        gives_up = score.failure or f"{score.function} gives up {score.lost:.2g}"
        return f"another model: {gives_up}, {score.allowed:.2g} is allowed"
    if record.is_other_model(comparison.baseline) and not record.is_accepted:
        return "another model: speed alone does not decide about it"
    if not record.is_checked and record.accuracy is not None:
        return f"not checked: {record.accuracy.reason}"
    return ""


def _unbounded(comparison: Comparison, record: Record, ratio: Ratio, best: str) -> str:
    """Why rounds that give no interval were enough to leave it out, if they were."""
    if is_behind(comparison.baseline.times_s, record.times_s, 2.0):
        return f"far slower than {comparison.baseline.name}: {ratio}"
    if ratio.pairs >= RACE_ROUNDS and ratio.median < WORTH_IT:
        return f"{'slower' if ratio.median < 2 - WORTH_IT else 'no gain'}: {ratio}"
    taken = next((row for row in comparison.records[1:] if row.name == best), None)
    leads = taken and comparison.ratio(taken)
    if leads and ratio.pairs >= RACE_ROUNDS and leads.median >= ratio.median:
        return f"falls behind {best} ({leads.median:.2f}×): {ratio}"
    why = "the machine was busy" if ratio.pairs >= LEAST_PAIRS else "too few rounds"
    return f"not proven, {why}: {ratio}"


def _share(comparison: Comparison, record: Record) -> str:
    times = memory_saved(comparison.baseline, record)
    return f"{1 / times:.0%}" if times else ""


def _beside(comparison: Comparison, record: Record, best: str) -> str:
    """What the plan that was taken does where both help."""
    taken = next((row for row in comparison.records if row.name == best), None)
    ratio, own = taken and comparison.ratio(taken), comparison.ratio(record)
    if ratio and own and ratio.median <= own.median and best.count("+") < record.name.count("+"):
        return "as much, with fewer parts"
    return "more"
