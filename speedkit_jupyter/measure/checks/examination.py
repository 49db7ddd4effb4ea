"""What is learned from single, untimed steps: accuracy, memory, operations, the machine's limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from speedkit_jupyter.measure.checks import memory, roofline
from speedkit_jupyter.measure.checks.accuracy import Accuracy
from speedkit_jupyter.measure.checks.observer import Run
from speedkit_jupyter.measure.checks.reference import draws_inside
from speedkit_jupyter.measure.checks.trials import Trials, is_compiled
from speedkit_jupyter.measure.rounds.runner import Runner
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.undo.snapshot import Snapshot

# A GradScaler halves its factor each time, from 65536 on.
MOST_SKIPPED = 16


class Examination:
    """Steps of working variants, each from the user's own state (`start`) or its warm one.

    One that raises is a row that says so; the others go on.
    """

    def __init__(
        self, runners: Sequence[Runner], start: Snapshot, check: Sequence[str] = ()
    ) -> None:
        self._runners, self._trials = runners, Trials(runners[0], start, check)

    @property
    def dropout_off(self) -> bool:
        """Whether dropout layers were off while accuracy was checked."""
        return self._trials.dropout_off

    def late(self, runner: Runner) -> Iterator[Progress]:
        """Check what a variant computes, after its rounds.

        It costs two steps of it; of the baseline, once for all variants, also one in float64, two
        plain ones, and a rounded one for each lower precision.
        """
        __tracebackhide__ = True
        if not runner.record.failure:
            yield Progress(1.0, f"checking {runner.record.name}")
            self._check(runner)

    def _check(self, runner: Runner) -> None:
        trials = self._trials
        if not trials.judge.baseline.ends:
            trials.prepare()
        judge = trials.judge
        precision = judge.judged_in(runner.precision)
        if not judge.void and precision != "fp32" and precision not in judge.controls:
            trials.add_control(precision, runner.scale())
        try:
            run = self._settled(runner)
        except Exception as error:
            runner.fail(error)
            return
        if runner.record.is_other_model(self._runners[0].record):
            runner.record.accuracy = judge.distance(run, runner.precision)
            return
        control = partial(trials.add_control, precision, runner.scale())
        accuracy = judge.verdict(run, runner.precision, (control, trials.run_again))
        runner.record.accuracy = self._unless_random(runner, accuracy)

    def _unless_random(self, runner: Runner, accuracy: Accuracy) -> Accuracy:
        """Not checked, where a variant may differ by its random numbers alone."""
        drawn = self._trials.judge.drawn
        if accuracy.verdict != "wrong" or not drawn:
            return accuracy
        inside = [] if runner.steps_only else sorted(filter(draws_inside, drawn))
        if is_compiled(runner):
            why = "the step draws random numbers; compiled code draws others"
        elif inside:
            why = f"the step draws random numbers inside of {', '.join(inside)}; kernels differ"
        else:
            return accuracy
        return replace(accuracy, verdict="not checked", reason=f"{why} ({accuracy.reason})")

    def _settled(self, runner: Runner) -> Run:
        """Once a GradScaler's factor is one at which it skips none of the steps."""
        for _ in range(MOST_SKIPPED):
            before = runner.scale()
            run = self._trials.run(runner)
            if not runner.scale() < before:
                break
        return run

    def memory(self) -> Iterator[Progress]:
        """The allocator's peak in one step of each variant."""
        for runner in self._runners:
            yield Progress(0.0, f"memory of {runner.record.name}")
            with self._warm(runner):
                state = memory.state_tensors(runner.step.models, runner.step.optimizers)
                runner.record.memory = memory.needed(runner.once, runner.device, state)

    def flops(self) -> int | None:
        """Operations of one step of the first variant; None where they can't be counted."""
        first, found = self._runners[0], 0
        with self._warm(first, fails=False):  # a dispatch mode, which some code does not allow
            found = roofline.flops(first.once, first.step.models)
        return found or None

    def limits(self, flops: int | None) -> Iterator[Progress]:
        """What this machine could do at best, in each variant's precision."""
        import torch

        first = self._runners[0]
        if flops is None or first.record.memory is None:
            return
        dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}
        for runner in self._runners:
            yield Progress(0.0, f"the machine's own limit, as in {runner.record.name}")
            lowered = any(context.plan["precision"].active for context in runner.contexts)
            dtype = dtypes.get(runner.precision, torch.float32) if lowered else torch.float32
            with runner.applied():
                peak = roofline.peak(runner.device, dtype, runner.precision)
            runner.record.limit_s = peak.limit_s(flops, first.record.memory.state_bytes)

    @contextmanager
    def _warm(self, runner: Runner, fails: bool = True) -> Iterator[None]:
        """The variant in force, in its warm state; an error in the block is the variant's."""
        assert runner.warm is not None
        with runner.applied():
            runner.warm.restore()
            try:
                yield
            except Exception as error:
                if fails:
                    runner.fail(error)
