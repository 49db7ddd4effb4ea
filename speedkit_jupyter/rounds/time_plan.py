"""Divide a benchmark's budget: the variants that fit, their rounds and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speedkit_jupyter.rounds import budget as costs
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.runner import Runner
from speedkit_jupyter.rounds.sampler import Policy

# If time is short, variants that are this many times slower in warm-up are left out first.
HOPELESS = 2.0


@dataclass(frozen=True)
class TimePlan:
    """Seconds for the rounds of the `runners`, and seconds reserved for the checks after them.

    `left_out` variants don't fit into the budget.
    """

    runners: list[Runner]
    left_out: list[Runner]
    rounds_s: float
    reserved_s: float


def checks_s(runners: Sequence[Runner], policy: Policy) -> float:
    """Return the estimated seconds of checking all variants but the first."""
    number = len(runners[1:]) if policy.checked is None else min(len(runners[1:]), policy.checked)
    if not number:
        return 0.0
    lowered = {runner.precision for runner in runners} - {runners[0].precision}
    steps = costs.REFERENCE + costs.CHECKED * (len(lowered) + number)
    return steps * runners[0].usual_s + costs.CHECK_S * number


def time_plan(warm: Sequence[Runner], policy: Policy, budget: Budget) -> TimePlan:
    """Divide the remaining budget between the rounds and the checks of the warm variants.

    If it is too short, far slower variants are left out first, then the last; two are kept.
    """

    def least_s(runners: Sequence[Runner]) -> float:
        rounds = policy.least_rounds(len(runners) - 1)
        return costs.LATEST * rounds * sum(runner.usual_s for runner in runners)

    kept, left_out, left_s = list(warm), list[Runner](), budget.left_s
    while len(kept) > 1 and not budget.is_minimal:
        if least_s(kept) + checks_s(kept, policy) <= left_s:
            break
        if len(kept) == 2 and budget.allows(sum(runner.worst_s for runner in kept)):
            break
        slowest = max(kept[1:], key=lambda runner: runner.fastest_s)
        gone = slowest if slowest.times_slower(kept[0]) > HOPELESS else kept[-1]
        left_out.append(gone)
        kept = [runner for runner in kept if runner is not gone]
    one_s = min(checks_s(kept[:2], policy), left_s / 2)
    reserved_s = max(min(checks_s(kept, policy), left_s - least_s(kept)), one_s, 0.0)
    rounds_s = left_s - reserved_s
    if budget.is_minimal:
        rounds_s = max(rounds_s, min(budget.seconds, costs.OVERHEAD_S / 2))
    return TimePlan(kept, left_out, min(rounds_s, policy.rounds_s), reserved_s)
