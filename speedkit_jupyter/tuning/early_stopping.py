"""When a search gives a variant up: what can't win any more need not be measured more exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.rounds.pace import FAR
from speedkit_jupyter.measure.rounds.runner import Runner

# A gain below this is not worth a change, and not the time to prove it. Compiling has to bring it
# over the best plan without it, since it takes seconds at every start.
WORTH_IT = 1.02
# A plan that saves less memory than this share is not worth a change.
LEAST_SAVED = 0.01
# What chooses goes on until its intervals are as narrow as this share of the median.
ENOUGH_TO_CHOOSE = 0.08
# So many rounds in a row far slower, and a variant is given up.
FAR_ROUNDS = 3
# A proof gives up what was slower by so much in each of them: there may be time for something else.
BEHIND = 1.1
# By so much while warming up, and it is not even taken into the rounds.
TOO_SLOW = 3.0


def is_too_slow(runner: Runner, baseline: Runner) -> bool:
    """By the fastest of some warm-up steps, which no disturbance makes faster than it is.

    Not so where the baseline itself has taken as long: what disturbs it may disturb both.
    """
    times = runner.fastest_s / max(baseline.fastest_s, 1e-9)
    if times <= TOO_SLOW or runner.fastest_s <= baseline.worst_s:
        return False
    slower = f"far slower than {baseline.record.name}"
    runner.record.notes["dropped"] = f"{slower}: {times:.1f} times in its fastest step"
    return True


# In a race: from so many rounds on, by so many standard errors of the median, and by at least
# this share; it ends after so many rounds, since what is left by then is as fast.
RACE_ROUNDS, RACE_ERRORS, RACE_SHARE, MOST_RACE_ROUNDS = 3, 3.0, 0.01, 40
# Nothing leaves before the steps have taken so many seconds in all, or the race is over: what
# disturbs a machine for a moment would else be all that a race of short steps has seen.
LEAST_RACE_S = 0.25
# A standard error is never taken to be smaller: three rounds may agree by chance.
LEAST_SCATTER = 0.005


def is_early(records: Sequence[Record]) -> bool:
    """Whether a race of these has seen too little to give any of them up."""
    rounds = len(records[0].times_s)
    raced_s = sum(sum(record.times_s) for record in records)
    return rounds < RACE_ROUNDS or (raced_s < LEAST_RACE_S and rounds < MOST_RACE_ROUNDS)


def fallen_behind(records: Sequence[Record]) -> list[Record]:
    """Of those still in a race, with as many times each, the ones that the fastest leaves behind.

    Paired within the rounds; the scatter of one round is taken from all of them together.
    """
    import numpy as np

    if len(records) < 2 or is_early(records):
        return []
    rounds = len(records[0].times_s)
    logs = np.log(np.array([record.times_s for record in records]))
    # What compiles has to lead by what it has to bring; else nothing is left to tell.
    costs = [WORTH_IT if record.is_compiled else 1.0 for record in records]
    logs += np.log(costs)[:, None]
    behind = logs - logs[np.argmin(np.median(logs, axis=1))]
    medians = np.median(behind, axis=1)
    deviations = np.median(np.abs(behind - medians[:, None]), axis=1)[medians > 0]
    scatter = max(1.48 * float(np.median(deviations)) if len(deviations) else 0.0, LEAST_SCATTER)
    margin = max(RACE_ERRORS * 1.25 * scatter / rounds**0.5, RACE_SHARE)
    return [record for record, median in zip(records, medians, strict=True) if median > margin]


def is_far_behind(
    baseline_s: Sequence[float], times_s: Sequence[float], times: float = FAR
) -> bool:
    """Whether every one of some rounds was so many `times` slower: no verdict, but not worth
    waiting for one, since such rounds are long.
    """
    pairs = list(zip(baseline_s, times_s, strict=False))
    return len(pairs) >= FAR_ROUNDS and all(slow > times * base for base, slow in pairs)


def saved(baseline: Record, record: Record) -> float:
    """How many times less memory it needs at its fullest moment; 0 where that is not known."""
    before, now = baseline.memory, record.memory
    if not (before and now and before.peak_bytes and now.peak_bytes):
        return 0.0
    return before.peak_bytes / now.peak_bytes


def costs_too_much(baseline: Record, record: Record, times: float = TOO_SLOW) -> bool:
    """Whether it is slower by more than less memory is worth, in each of some rounds."""
    too_slow = is_far_behind(baseline.times_s, record.times_s, times)
    return "dropped" in record.notes or too_slow


def cannot_win(comparison: Comparison, record: Record) -> bool:
    """Whether its interval, at a planned look, leaves nothing to hope for."""
    ratio, hopeless = comparison.ratio(record), ("slower", "wrong", "not checked")
    if ratio is None:
        return False
    return comparison.verdict(record) in hopeless or ratio.high < WORTH_IT


def gains_nothing(comparison: Comparison, record: Record) -> bool:
    """Whether nothing speaks for it at a planned look: it was no faster in half of the rounds.

    What gains several percent hardly ever looks like that after the ten rounds of the first look.
    """
    ratio = comparison.ratio(record)
    return ratio is not None and ratio.median <= 1


def is_clear_enough(comparison: Comparison, racing: Sequence[Record]) -> bool:
    """Whether one can choose, at a planned look; of two there is nothing to choose."""
    enough = ENOUGH_TO_CHOOSE if len(racing) > 2 else math.inf
    ratios = [comparison.ratio(record) for record in racing]
    return all(
        ratio.verdict != "too noisy" and ratio.is_precise(enough) for ratio in ratios if ratio
    )
