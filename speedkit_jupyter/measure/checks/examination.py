"""What is learned from single, untimed steps: accuracy, memory, operations, the machine's limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from speedkit_jupyter.measure.checks import counted_columns, memory, roofline
from speedkit_jupyter.measure.checks.accuracy import is_finite, stands
from speedkit_jupyter.measure.checks.judging import controls, layout_queries
from speedkit_jupyter.measure.checks.judging.untouched import otherwise
from speedkit_jupyter.measure.checks.judging.verdicts import Judge
from speedkit_jupyter.measure.checks.observing.course import Course
from speedkit_jupyter.measure.checks.observing.trials import Steps, is_compiled
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.rounds.runner import Runner
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.subject.samples import of_a_step as samples_of
from speedkit_jupyter.measure.undo.isolation import State

STEPS_LATER = "all its steps"
# A GradScaler halves its factor each time, from 65536 on.
MOST_SKIPPED = 16
# The baseline gives the same bits so many times more, where a variant is to give them.
AGAIN = 2


class Examination:
    """Steps of working variants, each from the user's own state (`start`) or its warm one.

    One that raises is a row that says so; the others go on.
    """

    def __init__(
        self,
        runners: Sequence[Runner],
        start: State,
        check: Sequence[str] = (),
    ) -> None:
        self._runners, self._steps = runners, Steps(start, check)
        self._yardstick: Judge | None = None

    @property
    def dropout_off(self) -> bool:
        """Whether dropout layers were off while accuracy was checked."""
        return self._steps.dropout_off

    def accuracy(self, to_check: Callable[[Record], bool]) -> Iterator[Progress]:
        """A few steps against the same in float64, of each variant that is `to_check`: asked once
        those before it are judged.
        """
        __tracebackhide__ = True
        yield Progress(0.0, "checking what is computed")
        for runner in self._runners[1:]:
            if to_check(runner.record):
                self._judge(runner, self._known())
                yield Progress(0.0, f"checked {runner.record.name}")

    def _known(self) -> Judge:
        """What variants are judged by."""
        __tracebackhide__ = True
        if self._yardstick is None:
            judge = self._yardstick = controls.made(self._steps, self._runners)
            first = self._runners[0]
            first.record.accuracy = judge.judge(judge.baseline, first.precision)
        return self._yardstick

    def late(self, runner: Runner) -> Iterator[Progress]:
        """After all its steps: one that was not checked yet, or what was right once more."""
        __tracebackhide__ = True
        record = runner.record
        before = record.accuracy
        if record.failure or not (before is None or stands(before)):
            return
        yield Progress(1.0, f"checking {record.name}{' again' if before else ''}")
        self._judge(runner, self._known())
        now = record.accuracy
        if before is None or now is None:
            return
        late = replace(now, reason=f"after {STEPS_LATER}: {now.reason}")
        record.accuracy = before if stands(now) else late

    def _judge(self, runner: Runner, known: Judge) -> None:
        try:
            course = self._settled(runner)
        except Exception as error:
            runner.fail(error)
            return
        if runner.record.is_other_model(self._runners[0].record):
            runner.record.accuracy = known.distance(course, runner.precision)
            return
        more = partial(controls.more, known, self._steps, self._runners, runner.precision)
        accuracy = known.judge(course, runner.precision, more)
        if (
            accuracy.verdict == "wrong"
            and (why := self._why_random(runner))
            and is_finite(accuracy)
        ):
            accuracy = replace(accuracy, verdict="not checked", reason=f"{why} ({accuracy.reason})")
        if accuracy.verdict in ("exact", "rounding") and (fault := self._otherwise(runner, course)):
            accuracy = replace(accuracy, verdict="wrong", reason=fault)
        runner.record.accuracy = accuracy  # also where no time is left for what follows
        accused = accuracy.verdict == "wrong" or accuracy.doubtful
        if accused and (why := self._asks_for_layout(runner, course, known)):
            reason = f"{why} ({accuracy.reason})"
            runner.record.accuracy = replace(accuracy, verdict="not checked", reason=reason)
        elif accuracy.verdict == "wrong" and self._changes_by_itself(known):
            reason = f"the step itself computes something else at times ({accuracy.reason})"
            runner.record.accuracy = replace(accuracy, verdict="not checked", reason=reason)

    def _asks_for_layout(self, runner: Runner, course: Course, known: Judge) -> str:
        """Why whole numbers and words that differ may be what the plan is to change; empty where
        they may not: of a layout, say, or where other things are wrong too.
        """
        first, others = self._runners[0], layout_queries.without_exact(course, known.baseline)
        rest = known.judge(others, runner.precision)
        if is_compiled(first) or rest.verdict == "wrong" or rest.doubtful:
            return ""
        asked: set[str] = set()
        self._steps.observed(first, lambda: layout_queries.noted(asked))
        names = ", ".join(f"Tensor.{name}" for name in sorted(asked))
        return f"the step asks how its tensors lie in memory: {names}" if names else ""

    def _changes_by_itself(self, judge: Judge) -> bool:
        """Whether the baseline, run again now, would be accused as well: by the clock, say."""
        first = self._runners[0]
        again = (self._steps.observed(first) for _ in range(AGAIN))
        return any(judge.judge(course, first.precision).verdict == "wrong" for course in again)

    def _otherwise(self, runner: Runner, course: Course) -> str:
        """What a plan does otherwise that has nothing to do with it; empty where nothing.

        Not where the baseline itself does it otherwise each time.
        """
        judge = self._yardstick
        if judge is None or not runner.steps_only or not (fault := otherwise(course, judge)):
            return ""
        again = (self._steps.observed(self._runners[0]) for _ in range(AGAIN))
        return "" if any(otherwise(repeat, judge, exactly=True) for repeat in again) else fault

    def _settled(self, runner: Runner) -> Course:
        """Once a GradScaler's factor is one at which it skips none of the steps."""
        for _ in range(MOST_SKIPPED):
            before = runner.scale()
            course = self._steps.observed(runner)
            if not runner.scale() < before:
                break
        return course

    def _why_random(self, runner: Runner) -> str:
        """Why this variant may differ by its random numbers alone; empty where it may not."""
        if not self._steps.is_random:
            return ""
        if is_compiled(runner):
            return "the step draws random numbers; compiled code draws others"
        inside = "" if runner.steps_only else ", ".join(sorted(self._steps.drawn_inside))
        return f"the step draws random numbers inside of {inside}; kernels differ" if inside else ""

    def memory(self) -> Iterator[Progress]:
        """The allocator's peak in one step of each variant."""
        for runner in self._runners:
            yield Progress(0.0, f"memory of {runner.record.name}")
            assert runner.warm is not None
            with runner.applied():
                runner.warm.restore()
                state = memory.state_tensors(runner.step.models, runner.step.optimizers)
                try:
                    runner.record.memory = memory.needed(runner.once, runner.device, state)
                except Exception as error:
                    runner.fail(error)

    def quantities(self) -> Iterator[Progress]:
        """What else this machine counts, of each variant; of a sample too, where there are some."""
        samples: int | None = None
        for runner in self._runners:
            for quantity in counted_columns.QUANTITIES:
                read = None if runner.record.failure else quantity.meter(runner.device)
                if read is None or runner.warm is None:
                    continue
                yield Progress(0.0, f"{quantity.title} of {runner.record.name}")
                samples = samples or self._samples()
                with runner.applied():
                    runner.warm.restore()
                    try:
                        value = counted_columns.of_a_step(runner.once, runner.device, read)
                    except Exception as error:
                        runner.fail(error)
                    else:
                        runner.record.quantities |= quantity.values(value, samples)

    def _samples(self) -> int | None:
        """Of one step, where it can be told."""
        first = self._runners[0]
        assert first.warm is not None
        try:
            with first.applied():
                first.warm.restore()
                return samples_of(first.once, first.step.models)
        except Exception:  # it will say so itself
            return None

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

    def flops(self) -> int | None:
        """Operations of one step of the first variant; None where they can't be counted."""
        first = self._runners[0]
        assert first.warm is not None
        try:
            with first.applied():
                first.warm.restore()
                # 0: no operation that the counter knows
                return roofline.flops(first.once, first.step.models) or None
        except Exception:  # the counter is a dispatch mode, which some code does not allow
            return None
