"""How much better a candidate is, and why it was not taken."""

from __future__ import annotations

import math

from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.results.statistics import LEAST_PAIRS, Ratio, spread
from speedkit_jupyter.tuning.early_stopping import (
    LEAST_SAVED,
    RACE_ROUNDS,
    WORTH_IT,
    costs_too_much,
    is_far_behind,
    saved,
)

# What looks slower by less than this in a race may be faster.
NARROW = 0.9


def score(
    comparison: Comparison,
    record: Record,
    objective: str,
    steps: int | None,
    within: float | None = None,
) -> float:
    """How many times better than what it is compared with; 0 where not proven better and right.

    By time, by `memory`, or by the total time of so many steps, compiling included. Memory may
    cost time, but nothing that is far slower; no more than `within` times the time, where that is
    given, which has to be proven too.
    """
    verdict = comparison.verdict(record)
    if record.same_as_baseline or verdict in ("failed", "declined", "wrong"):
        return 0.0
    if not record.is_checked or record.is_other_model(comparison.baseline):
        return 0.0
    if objective == "memory":
        proven = within is None or (_speed(comparison, record)[0] * within >= 1)
        costly = costs_too_much(comparison.baseline, record)
        return _memory_score(comparison, record) if proven and not costly else 0.0
    ratio = comparison.ratio(record)
    if ratio is None or verdict != "faster":
        return 0.0
    return ratio.median if steps is None else _over_steps(comparison, record, ratio.median, steps)


def _speed(comparison: Comparison, record: Record) -> tuple[float, float]:
    """The low end of its speed-up, and the middle; 0 where neither is known."""
    ratio = comparison.ratio(record)
    return (0.0, 0.0) if ratio is None else (ratio.low, ratio.median)


def _over_steps(comparison: Comparison, record: Record, speedup: float, steps: int) -> float:
    before = comparison.baseline
    steps_s = steps * spread(before.times_s).median_s
    compiling_s = before.settling_s if before.is_compiled else 0.0
    return (compiling_s + steps_s) / (record.settling_s + steps_s / speedup)


def value(
    comparison: Comparison,
    record: Record,
    objective: str,
    steps: int | None,
    within: float | None = None,
) -> float:
    """How many times better it looks, proven or not, to choose by; 0 where it must not be chosen.

    By time; by `memory` as `score` has it, if it looks to be `within` the time; by the total time
    of so many steps.
    """
    if objective == "memory":
        seems = within is None or _speed(comparison, record)[1] * within >= 1
        return score(comparison, record, objective, steps) if seems else 0.0
    if record is comparison.baseline:
        return 1.0
    ratio, verdict = comparison.ratio(record), comparison.verdict(record)
    fell_behind = len(record.times_s) < len(comparison.baseline.times_s)
    if (
        ratio is None
        or fell_behind
        or record.same_as_baseline
        or record.is_other_model(comparison.baseline)
        or verdict in ("failed", "declined", "wrong")
    ):
        return 0.0
    if record.accuracy is not None and record.accuracy.verdict == "not checked":
        return 0.0
    return ratio.median if steps is None else _over_steps(comparison, record, ratio.median, steps)


def lost_narrowly(comparison: Comparison, record: Record) -> bool:
    """Whether it is right, and close to what it is compared with, without an interval."""
    ratio = comparison.ratio(record)
    if ratio is None or record.failure or record.same_as_baseline or not record.is_checked:
        return False
    if comparison.verdict(record) == "wrong" or record.is_other_model(comparison.baseline):
        return False
    return ratio.median > NARROW and math.isinf(ratio.high)


def is_clearly_no_gain(comparison: Comparison, record: Record) -> bool:
    """Whether its whole interval lies below what is worth a change."""
    ratio = comparison.ratio(record)
    return ratio is not None and ratio.high < WORTH_IT


def _memory_score(comparison: Comparison, record: Record) -> float:
    times = saved(comparison.baseline, record)
    return times if times > 1 + LEAST_SAVED else 0.0


def _share(comparison: Comparison, record: Record) -> str:
    times = saved(comparison.baseline, record)
    return f"{1 / times:.0%}" if times else ""


def why_not(
    comparison: Comparison,
    record: Record,
    best: str,
    objective: str = "time",
    within: float | None = None,
) -> str:
    """Why it is not in the plan, with its number."""
    verdict = comparison.verdict(record)
    if record.failure:
        return f"{verdict}: {record.failure}"
    if verdict == "wrong" and record.accuracy is not None:
        return f"wrong: {record.accuracy.reason}"
    if record.same_as_baseline:
        return "changes nothing here"
    if record.score is not None and record.is_refused:
        score = record.score
        gives_up = score.failure or f"{score.function} gives up {score.lost:.2g}"
        return f"another model: {gives_up}, {score.allowed:.2g} is allowed"
    if record.is_other_model(comparison.baseline) and not record.is_accepted:
        return "another model: speed alone does not decide about it"
    if not record.is_checked and record.accuracy is not None:
        return f"not checked: {record.accuracy.reason}"
    if (
        objective == "memory"
        and within is not None
        and (slower := _beyond(comparison, record, within))
    ):
        return slower
    weighs = objective == "memory" and not costs_too_much(comparison.baseline, record)
    if weighs and (share := _share(comparison, record)):
        leads = next((row for row in comparison.records[1:] if row.name == best), None)
        beside = f", {best} {_share(comparison, leads)}" if leads is not None else ""
        if not record.is_checked:
            beside = ", but there was no time to check what it computes"
        return f"its peak is {share} of {comparison.baseline.name}'s{beside}"
    ratio = comparison.ratio(record)
    if ratio is None:
        return record.why_not_measured or "not measured"
    if not ratio.is_bounded and is_far_behind(comparison.baseline.times_s, record.times_s):
        slower = f"far slower than {comparison.baseline.name}"
        return f"{slower} in each of {ratio.pairs} rounds: {ratio.median:.2f}×"
    if not ratio.is_bounded:
        return _unbounded(comparison, record, ratio, best)
    number = str(ratio)
    if comparison.baseline.applied:
        number += f" against {comparison.baseline.name}"
    if verdict == "faster":
        return f"helps ({number}), {best} {_beside(comparison, record, best)}"
    if verdict == "too noisy" and ratio.high < WORTH_IT:
        return f"gains less than {WORTH_IT - 1:.0%}: {number}"
    return f"not proven faster: {number}" if verdict == "too noisy" else f"{verdict}: {number}"


def _unbounded(comparison: Comparison, record: Record, ratio: Ratio, best: str) -> str:
    """Why rounds that give no interval were enough to leave it out, if they were."""
    if ratio.pairs >= RACE_ROUNDS and ratio.median < WORTH_IT:
        return f"{'slower' if ratio.median < 2 - WORTH_IT else 'no gain'}: {ratio}"
    taken = next((row for row in comparison.records[1:] if row.name == best), None)
    lead = taken and comparison.ratio(taken)
    if lead and ratio.pairs >= RACE_ROUNDS and lead.median >= ratio.median:
        return f"falls behind {best} ({lead.median:.2f}×): {ratio}"
    why = "the machine was busy" if ratio.pairs >= LEAST_PAIRS else "too few rounds"
    return f"not proven, {why}: {ratio}"


def _beyond(comparison: Comparison, record: Record, within: float) -> str:
    """Why it is too slow, where it is, or is not known to be quick enough."""
    ratio = comparison.ratio(record)
    if ratio is None or ratio.low * within >= 1:
        return ""
    share = _share(comparison, record)
    saves = f"its peak is {share} of {comparison.baseline.name}'s, but " if share else ""
    time = f"{1 / ratio.median:.2f} times the time"
    if ratio.median * within >= 1:
        return f"{saves}not proven to take {within:g} times the time at most: {time} in the middle"
    return f"{saves}it takes {time}, more than {within:g}"


def _beside(comparison: Comparison, record: Record, best: str) -> str:
    """What the plan that was taken does where both help."""
    taken = next((row for row in comparison.records if row.name == best), None)
    ratio, own = taken and comparison.ratio(taken), comparison.ratio(record)
    if ratio and own and ratio.median <= own.median and best.count("+") < record.name.count("+"):
        return "as much, with fewer parts"
    return "more"
