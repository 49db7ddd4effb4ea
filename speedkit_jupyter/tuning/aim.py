"""What a search is for, how much better a candidate is, and why it was not taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.results.statistics import Ratio, spread

# A plan that saves less memory than this share is not worth a change.
LEAST_SAVED = 0.01
# What is slower by so much while warming up is not timed, nor does less memory make up for it.
FAR_SLOWER = 3.0
# What is slower in each of so many rounds is not worth more of them.
FAR_ROUNDS = 3


@dataclass(frozen=True)
class Aim:
    """Less time of a step, of so many `steps` with compiling, or of `memory` that may take `within`
    times the time.
    """

    memory: bool = False
    within: float | None = None
    steps: int | None = None

    def gain(self, comparison: Comparison, record: Record, proven: bool = False) -> float:
        """Return how many times better it looks, or is `proven` to be and right; 0 where it must
        not be chosen.
        """
        ratio = comparison.ratio(record)
        if is_out(comparison, record) or record.same_as_baseline or ratio is None:
            return 0.0
        if proven and record.accuracy is None:
            return 0.0
        if self.memory:
            saved = memory_saved(comparison.baseline, record)
            is_quick = self._is_quick(ratio.low if proven else ratio.median)
            return saved if is_quick and saved > 1 + LEAST_SAVED else 0.0
        fell_behind = len(record.times_s) < len(comparison.baseline.times_s)
        if fell_behind or (proven and comparison.verdict(record) != "faster"):
            return 0.0
        return self._in_all(comparison, record, ratio.median)

    def _is_quick(self, speedup: float) -> bool:
        return speedup * (self.within or FAR_SLOWER) >= 1

    def _in_all(self, comparison: Comparison, record: Record, speedup: float) -> float:
        """Return the same over all the steps, what compiling takes included."""
        if self.steps is None:
            return speedup
        before = comparison.baseline
        steps_s = self.steps * spread(before.times_s).median_s
        compiling_s = before.settling_s if before.is_compiled else 0.0
        return (compiling_s + steps_s) / (record.settling_s + steps_s / speedup)

    def why_not(self, comparison: Comparison, record: Record, best: str) -> str:
        """Return why it is not in the plan, with its number; `best` names what is."""
        if reason := _not_right(comparison, record):
            return reason
        ratio, verdict = comparison.ratio(record), comparison.verdict(record)
        if self.memory and (saved := memory_saved(comparison.baseline, record)):
            return f"its peak is {1 / saved:.0%} of {comparison.baseline.name}'s" + self._time(
                ratio
            )
        if ratio is None:
            return record.why_not_measured or "not measured"
        if verdict == "faster":
            return f"helps ({ratio}), {_beside(comparison, ratio, record, best)}"
        if verdict == "slower" or is_behind(comparison.baseline.times_s, record.times_s, 1.0):
            return f"slower: {ratio}"
        if len(record.times_s) < len(comparison.baseline.times_s):
            return f"falls behind what is faster: {ratio}"
        return f"not proven faster: {ratio}"

    def _time(self, ratio: Ratio | None) -> str:
        """Return what it takes for the memory; nothing where that is no matter."""
        if ratio is None or self._is_quick(ratio.low):
            return ""
        text = f", but it takes {1 / ratio.median:.2f} times the time"
        if self._is_quick(ratio.median):
            return f"{text}, not proven to be {self.within or FAR_SLOWER:g} at most"
        return f"{text}, more than {self.within or FAR_SLOWER:g}"


def is_out(comparison: Comparison, record: Record) -> bool:
    """Return whether it can't be the plan, however fast."""
    refused = comparison.verdict(record) in ("failed", "declined", "wrong")
    return refused or not record.is_checked or record.is_other_model(comparison.baseline)


def _not_right(comparison: Comparison, record: Record) -> str:
    """Return why no speed counts; empty where it does."""
    verdict = comparison.verdict(record)
    if record.failure:
        return f"{verdict}: {record.failure}"
    if record.same_as_baseline:
        return "changes nothing here"
    if record.is_other_model(comparison.baseline):
        return "another model: speed alone does not decide about it"
    if record.accuracy is not None and (verdict == "wrong" or not record.is_checked):
        return f"{record.accuracy.verdict}: {record.accuracy.reason}"
    return ""


def _beside(comparison: Comparison, own: Ratio, record: Record, best: str) -> str:
    """Return what the plan that was taken does where both help."""
    taken = next((row for row in comparison.records if row.name == best), None)
    ratio = taken and comparison.ratio(taken)
    if ratio and ratio.median <= own.median and best.count("+") < record.name.count("+"):
        return f"{best} as much, with fewer parts"
    return f"{best} more"


def is_behind(baseline_s: Sequence[float], times_s: Sequence[float], times: float) -> bool:
    """Return whether every one of some rounds was so many `times` slower: no verdict, but not
    worth waiting for one.
    """
    pairs = list(zip(baseline_s, times_s, strict=False))
    return len(pairs) >= FAR_ROUNDS and all(slow > times * base for base, slow in pairs)


def memory_saved(baseline: Record, record: Record) -> float:
    """Return how many times less memory it needs at its fullest moment; 0 where not known."""
    before, now = baseline.memory, record.memory
    if not (before and now and before.peak_bytes and now.peak_bytes):
        return 0.0
    return before.peak_bytes / now.peak_bytes
