"""What is learned from single, untimed steps: accuracy, memory, operations, the machine's limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from speedkit_jupyter.measure import accuracy, memory, roofline
from speedkit_jupyter.measure.accuracy import Observation
from speedkit_jupyter.measure.isolation import State
from speedkit_jupyter.measure.runner import Runner
from speedkit_jupyter.measure.sampler import Progress


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
        self._runners, self._start, self._check = runners, start, check
        self.dropout_off = False

    def accuracy(self) -> Iterator[Progress]:
        """One step of each variant against the same step in float64."""
        __tracebackhide__ = True
        start = self._start
        yield Progress(0.0, "checking what is computed")
        reference, is_random = self._reference(self._runners[0])
        baseline = None
        for runner in self._runners:
            start.restore()  # before the plan is applied: settings are part of the state
            try:
                with runner.applied(), self._without_dropout():
                    seen = runner.observed(self._check)
            except Exception as error:
                if runner is self._runners[0]:  # the step itself, or what is asked of it
                    raise
                runner.fail(error)
                continue
            finally:
                start.restore()
            baseline = seen if baseline is None else baseline
            runner.record.accuracy = accuracy.judge(
                seen, reference or baseline, baseline, runner.precision, is_random
            )
            yield Progress(0.0, f"checked {runner.record.name}")

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        """For one step: what is restored before the next one brings the layers' settings back."""
        with accuracy.without_dropout(self._runners[0].step.models) as found:
            self.dropout_off = found
            yield

    def _reference(self, runner: Runner) -> tuple[Observation | None, bool]:
        """The step in float64 (None where the model can't), and whether it is random."""
        import torch

        seen = []
        try:
            for seed in (None, 1):  # another draw: only a random step answers to it
                self._start.restore()
                if seed is not None:
                    torch.manual_seed(seed)
                with (
                    runner.applied(),
                    roofline.eager(),
                    self._without_dropout(),
                    accuracy.in_float64(runner.step.models),
                ):
                    seen.append(runner.observed(self._check, stop_at_step=not self._check))
        except Exception:  # an operation without float64, or code that asks for float32
            return None, False
        finally:
            self._start.restore()
        return seen[0], accuracy.differ(*seen)

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

    def limits(self, flops: int | None) -> Iterator[Progress]:
        """What this machine could do at best, in each variant's precision."""
        import torch

        first = self._runners[0]
        if flops is None or first.record.memory is None:
            return
        dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}
        for runner in self._runners:
            yield Progress(0.0, f"the machine's own limit, as in {runner.record.name}")
            lowered = runner.contexts[0].plan["precision"].active
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
