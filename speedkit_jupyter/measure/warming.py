"""Warm-up: until a variant's steps are alike."""

from __future__ import annotations

import math

from speedkit_jupyter.exceptions import StepError
from speedkit_jupyter.measure import clock
from speedkit_jupyter.measure.runner import Runner
from speedkit_jupyter.measure.sampler import OVERFLOW

# It ends when two neighbouring steps differ by less than this and nothing was compiled in the
# last one, or after so many steps; a GradScaler may need more until it skips none.
STABLE, MOST_WARM_UP, MOST_SKIPPED = 0.2, 12, 30


def warm_up(runner: Runner, most_s: float) -> None:
    """Steps until two are alike and nothing is compiled any more; what they cost is noted.

    Beyond the first call, which may compile, it takes no longer than about `most_s` seconds.
    Raises what the step raises, and StepError where a GradScaler goes on skipping.
    """
    __tracebackhide__ = True
    record, device = runner.record, runner.device
    with record.compilations.counted():
        record.first_call_s = clock.timed(runner.once, device)
    last, spent, calls = record.first_call_s, record.first_call_s, 1
    runner.fastest_s = math.inf
    while calls < MOST_SKIPPED:
        graphs, scale = record.compilations.graphs, runner.scale()
        with record.compilations.counted():
            now = clock.timed(runner.once, device)
        spent, calls = spent + now, calls + 1
        runner.fastest_s = min(runner.fastest_s, now)
        skipped = runner.scale() < scale
        settled = calls > 2 and abs(now - last) < STABLE * last
        settled = settled and graphs == record.compilations.graphs
        enough = calls > MOST_WARM_UP or (calls > 2 and spent > record.first_call_s + most_s)
        if not skipped and (settled or enough):
            break
        last = now
    if skipped:
        raise StepError(OVERFLOW)
    runner.step_s = now
    record.settling_s = max(spent - calls * now, 0.0)
    record.notes.update({k: v for one in runner.contexts for k, v in one.notes.items()})
