"""Warm-up: until a variant's steps are alike."""

from __future__ import annotations

import math

from speedkit_jupyter.measure.rounds.budget import Budget
from speedkit_jupyter.measure.rounds.runner import Runner
from speedkit_jupyter.measure.rounds.sampler import OVERFLOW
from speedkit_jupyter.support.exceptions import StepError

# A first step that takes so many times the usual and this share of the budget, and compiled
# nothing, is enough to choose by.
HOPELESS, HOPELESS_SHARE = 30.0, 0.1
# It ends when two neighbouring steps differ by less than this and nothing was compiled in the
# last one, or after so many steps; a GradScaler may need more until it skips none.
STABLE, MOST_WARM_UP, MOST_SKIPPED = 0.2, 12, 30
# Where each of its steps was slower than any of the baseline's, others may have been in the way:
# it takes further ones, for this share of the budget at the most.
IN_THE_WAY = 0.02


def warm_up(
    runner: Runner, most_s: float, budget: Budget, usual_s: float = 0.0, hasty: bool = False
) -> None:
    """Steps until two are alike and nothing is compiled any more; what they cost is noted.

    Beyond the first call, which may compile, it takes no longer than about `most_s` seconds, and
    no step is begun that would, by the slowest of those before, end later than the budget allows.
    What calls that compile take beyond the `usual_s` of a step is no part of it. A `hasty` one
    ends with a hopeless first step. Its blocks will begin with the state that its first step left
    behind (the first that no scaler skipped): warm-ups differ in length, and a step may depend on
    how many were before it.
    Raises what the step raises, and StepError where a GradScaler goes on skipping.
    """
    __tracebackhide__ = True
    record, scale = runner.record, runner.scale()
    with record.compilations.counted():
        now = record.first_call_s = runner.timed()
    skipped = runner.scale() < scale
    _keep_state(runner, skipped)
    if record.compilations.graphs:
        budget.exclude(now - usual_s)
    last, spent, calls = now, now, 1
    runner.fastest_s = math.inf
    hopeless = 0 < HOPELESS * usual_s < now and now > HOPELESS_SHARE * budget.seconds
    if hasty and hopeless and not record.compilations.graphs:
        runner.step_s = runner.fastest_s = now
        return
    runner.recent_s.clear()
    # The first step of all is often the slowest, and nobody knows; nor how long one takes without
    # the compiling that the first call did.
    expected_s = usual_s if record.compilations.graphs or not usual_s else now
    while calls < MOST_SKIPPED and budget.allows(expected_s):
        graphs, scale = record.compilations.graphs, runner.scale()
        with record.compilations.counted():
            now = runner.timed()
        spent, calls = spent + now, calls + 1
        runner.fastest_s = min(runner.fastest_s, now)
        compiled = record.compilations.graphs > graphs
        if compiled:
            budget.exclude(now - usual_s)
        else:
            runner.recent_s.append(now)
            expected_s = runner.worst_s
        skipped = runner.scale() < scale
        _keep_state(runner, skipped)
        settled = calls > 2 and abs(now - last) < STABLE * last
        settled = settled and not compiled
        enough = calls > MOST_WARM_UP
        enough = enough or (spent > record.first_call_s + most_s and not compiled)
        doubtful = 0 < usual_s < runner.fastest_s and calls <= MOST_WARM_UP
        if doubtful and spent < record.first_call_s + IN_THE_WAY * budget.seconds:
            settled = enough = False
        if not skipped and (settled or enough):
            break
        last = now
    if skipped:
        raise StepError(OVERFLOW if calls >= MOST_SKIPPED else "the budget ended in its warm-up")
    runner.step_s, runner.fastest_s = now, min(runner.fastest_s, now)
    record.settling_s = max(spent - calls * now, 0.0)
    record.notes.update({k: v for context in runner.contexts for k, v in context.notes.items()})


def _keep_state(runner: Runner, skipped: bool) -> None:
    if runner.warm is None and not skipped and not runner.step.afresh:
        runner.warm = runner.state()
