"""What a search tries next, and what of it it takes: the plans near another, the best of a race."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.statistics import SAME
from speedkit_jupyter.measure.rounds.budget import APART
from speedkit_jupyter.tuning.aim import WORTH_IT, Aim, pays, row_of
from speedkit_jupyter.tuning.candidates import BASELINE, Candidate
from speedkit_jupyter.tuning.outcome import Known
from speedkit_jupyter.tuning.races import SLACK, Allowance

# A plan that lost a race by no more than this is proven or refuted with more rounds.
NARROW = 0.95
# What people write by hand: at the end it runs beside the plan, if it was timed.
BY_HAND = ("bf16", "fp16", "bf16+compile", "fp16+compile")


def near_ones(
    known: Known, warm: Collection[str], plan: Candidate, others: Iterable[Candidate]
) -> list[Candidate]:
    """Return first those whose parts gain most by themselves, beside what the plan loses for them;
    what would be compiled anew, though the plan itself is compiled, is left out.
    """
    speedups = {row.record.name: row.ratio.median or 1.0 for row in known.rows()}

    def gain(one: Candidate, other: Candidate) -> float:
        names = [name for name in one.values if other.values.get(name) != one.values[name]]
        return math.prod(speedups.get(one.part(name).name, 1.0) for name in names)

    quick = [one for one in others if not (plan.costly and one.costly) or one.name in warm]
    return sorted(quick, key=lambda other: gain(plan, other) / gain(other, plan))


def best_of(aim: Aim, comparison: Comparison, asked: Sequence[Candidate]) -> Candidate:
    """Return the best by its gain whose parts pay; of equals that of fewest parts."""
    gains = {plan.name: aim.gain(comparison, row_of(comparison, plan)) for plan in asked}
    plain = max([1.0, *(gains[plan.name] for plan in asked if not plan.costly)])
    able = [
        plan
        for plan in asked
        if gains[plan.name] > (WORTH_IT * plain if plan.costly else NARROW)
        and pays(plan, gains, asked)
    ]
    most = max([0.0, *(gains[plan.name] for plan in able)])
    equal = [plan for plan in able if gains[plan.name] * (1 + SAME) > most]
    return min(equal, key=lambda plan: len(plan.values), default=BASELINE)


def that_fit(
    known: Known,
    warm: Collection[str],
    budget: Allowance,
    whole: Candidate,
    others: Iterable[Candidate],
) -> list[Candidate]:
    """Return those that there is time for beside the plan: to be warmed up, and in rounds."""
    rows = {row.record.name: row.ratio.median for row in known.rows()}
    fitting, warming_s = {whole.name: whole}, 0.0
    times = 1 / (rows.get(whole.name) or 1.0)
    for plan in others:
        speedup = rows.get(plan.name) or 1.0
        more_s = 0.0 if plan.name in warm else APART * budget.step_s / speedup
        needed_s = warming_s + more_s + SLACK * budget.proof_s(times + 1 / speedup)
        if plan.name not in fitting and needed_s <= budget.left_s:
            fitting[plan.name], warming_s = plan, warming_s + more_s
            times += 1 / speedup
    return [plan for plan in fitting.values() if plan is not whole]


def rivals(known: Known) -> list[Candidate]:
    """Return the next best of the races, and what of BY_HAND was timed and may be right."""
    rows = {row.record.name: row.ratio.median for row in known.rows()}
    able = sorted((name for name in rows if rows[name] > 1), key=lambda name: -rows[name])
    names = [*able[:2], *(name for name in BY_HAND if name in able)]
    return [known.tried[name] for name in dict.fromkeys(names) if name in known.tried]
