"""What a search tries next, and what of it it takes: the plans near another, the best of a race."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median

from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.statistics import SAME
from speedkit_jupyter.search.candidates import BASELINE, BESIDE, WHOLE, Candidate
from speedkit_jupyter.search.objective import WORTH_IT, Aim, pays, row_of
from speedkit_jupyter.search.outcome import SearchState
from speedkit_jupyter.search.races import HOPELESS

# A plan that lost a race by no more than NARROW is proven or refuted with more rounds. One that
# promises less than PROMISING of the best one's speed does not race beside it.
NARROW, PROMISING = 0.95, 0.8
# Compiled blocks tie with the plan without compiling if they have this share of its speed: a ViT's
# had 0.976, where the whole model led by 1.04×, and three rounds are off by some 2 %.
BLOCKS_TIE = 0.93
# What people write by hand: at the end it runs beside the plan, if it was timed.
BY_HAND = ("bf16", "fp16", "bf16+compile", "fp16+compile")


def best_first(
    known: SearchState,
    warm: Collection[str],
    plan: Candidate,
    others: Iterable[Candidate],
    least: float = 0.0,
) -> list[Candidate]:
    """Return first those that are the fastest beside the plan, or may be by the parts in which they
    differ.

    What promises less than `least` of its speed is left out, as is what would be compiled anew
    where the plan is compiled, or no gain is promised.
    """
    speedups = {row.record.name: row.ratio.median for row in known.rows()}
    gains, now = _gains_of_parts(known, speedups), speedups.get(plan.name)

    def gain(one: Candidate, other: Candidate) -> float:
        names = [name for name in one.values if other.values.get(name) != one.values[name]]
        return math.prod(gains.get(one.part(name).name, 1.0) for name in names)

    def promised(one: Candidate) -> float:
        then = speedups.get(one.name)
        return then / now if now and then else gain(one, plan) / gain(plan, one)

    def is_quick(one: Candidate) -> bool:
        is_warm = not one.costly or one.name in warm
        promises = promised(one)
        return promises >= least and (is_warm or (promises >= WORTH_IT and not plan.costly))

    return sorted(filter(is_quick, others), key=promised, reverse=True)


def _gains_of_parts(known: SearchState, speedups: Mapping[str, float]) -> dict[str, float]:
    """Return how many times as fast each part, by its word, made the plans that were timed with it
    and without it: the median.
    """
    found: dict[str, list[float]] = {}
    for plan in known.tried.values():
        for name in plan.values:
            rest = plan.without(name)
            usual = 0.0 if rest.values.keys() - {BESIDE} else 1.0
            before, after = speedups.get(rest.name, usual), speedups.get(plan.name)
            if before and after:
                found.setdefault(plan.part(name).name, []).append(after / before)
    return {word: median(gains) for word, gains in found.items()}


def best_of(aim: Aim, comparison: Comparison, asked: Sequence[Candidate]) -> Candidate:
    """Return the best by its gain whose parts pay; of equals that of fewest parts.

    What compiles has to lead by more than so few rounds are off; in a proof it may still win.
    """
    gains = {plan.name: aim.gain(comparison, row_of(comparison, plan)) for plan in asked}
    plain = max([1.0, *(gains[plan.name] for plan in asked if not plan.costly)])
    able = [
        plan
        for plan in asked
        if gains[plan.name] > (plain / NARROW if plan.costly else NARROW)
        and pays(plan, gains, asked)
    ]
    most = max([0.0, *(gains[plan.name] for plan in able)])
    equal = [plan for plan in able if gains[plan.name] * (1 + SAME) > most]
    return min(equal, key=lambda plan: len(plan.values), default=BASELINE)


def compiled_whole(known: SearchState, plan: Candidate) -> list[Candidate]:
    """Return the plan with the whole model compiled, if that is new, and compiled blocks tied with
    the plan without compiling, or led it.
    """
    speedups = {row.record.name: row.ratio.median for row in known.rows()}
    gain, whole = _gains_of_parts(known, speedups).get("compile", 0.0), plan.joined(WHOLE)
    return [whole] if gain >= BLOCKS_TIE and known.is_new(whole) else []


def leads_by_far(comparison: Comparison, plan: Candidate) -> bool:
    """Return whether it left the baseline, and all others, hopelessly behind."""
    times = {record.name: median(record.times_s) for record in comparison.records if record.times_s}
    return all(times[name] > HOPELESS * times[plan.name] for name in times if name != plan.name)


def rivals(known: SearchState) -> list[Candidate]:
    """Return the next best of the races, and what of BY_HAND was timed and may be right."""
    rows = {row.record.name: row.ratio.median for row in known.rows()}
    able = {name: plan for name, plan in known.tried.items() if rows.get(name, 0.0) > 1}
    # A compiled plan counts as slower by what compiling has to bring.
    order = sorted(able, key=lambda name: -rows[name] / (WORTH_IT if able[name].costly else 1))
    return [able[name] for name in dict.fromkeys([*order[:2], *BY_HAND]) if name in able]
