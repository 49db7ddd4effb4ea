"""Test docs/contract.md: everything is restored after an error in the step and after Ctrl-C."""

import contextlib
import signal
from queue import SimpleQueue

import pytest
from training import Training

from speedkit_jupyter import benchmark

VARIANTS = ["baseline", "bf16", "channels_last+fused_optimizer"]


@pytest.mark.parametrize("at", [1, 3, 6, 11, 20])
@pytest.mark.parametrize(
    "fail", [lambda: 1 / 0, lambda: signal.raise_signal(signal.SIGINT)], ids=["error", "Ctrl-C"]
)
def test_an_error_and_ctrl_c_leave_everything_as_before(fail, at):
    training = Training()
    calls, before = SimpleQueue(), training.state()  # a measurement doesn't restore the queue

    def between():
        calls.put(0)
        if calls.qsize() == at:
            fail()

    # The first calls run the plain step and raise its error; a variant's error is in the result.
    with contextlib.suppress(ZeroDivisionError, KeyboardInterrupt):
        benchmark(lambda: training.step(between), VARIANTS, budget_s=2)
    assert calls.qsize() >= at
    assert training.state() == before
