"""Two more runs of a step whose later call was much faster: does it do less?"""

from __future__ import annotations

from collections.abc import Callable

from speedkit_jupyter.measure.rounds.runner import Runner
from speedkit_jupyter.measure.subject.repeats import Repeats, Work, counted, judged
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.undo.snapshot import Snapshot


def of_runner(runner: Runner, start: Snapshot) -> Repeats:
    """Judge a variant whose warm state is known; leave the models as they come out."""
    __tracebackhide__ = True
    step = runner.step
    with runner.applied():
        assert runner.warm is not None
        runner.warm.restore()
        later = _work(step, start, runner.once)
    start.restore()
    with runner.applied():
        first = _work(step, start, runner.once)
    return judged(first, later)


def of_loop(step: Step, start: Snapshot, run: Callable[[], object]) -> Repeats:
    """Judge a step as it stands, which ran before."""
    __tracebackhide__ = True
    later = _work(step, start, run)
    start.restore()
    return judged(_work(step, start, run), later)


def _work(step: Step, start: Snapshot, run: Callable[[], object]) -> Work:
    """With the user's random numbers: a step whose length is drawn does no less for that."""
    __tracebackhide__ = True
    start.restore_randomness()
    with counted(step.models) as work:
        run()
    return work
