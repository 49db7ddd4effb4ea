"""Ctrl-C ends a profile at once, with what is known, and puts everything back."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

from speedkit_jupyter import profile
from speedkit_jupyter.profiling.api import profiler_of
from speedkit_jupyter.support.interrupts import interruptible

pytestmark = pytest.mark.real_time


@pytest.mark.parametrize("call_s", [0.01, 30.0])
def test_ctrl_c_ends_a_profile_at_once_and_puts_everything_back(call_s):
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    before = net.weight.detach().clone()
    press = threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT])

    def step() -> None:
        net(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        time.sleep(call_s)

    begun_s = time.monotonic()
    press.start()
    with pytest.raises(KeyboardInterrupt):
        profile(step, budget_s=60)
    assert time.monotonic() - begun_s < 10
    assert torch.equal(net.weight, before)
    assert net.weight.grad is None
    assert not optimizer.state
    assert torch._C._len_torch_function_stack() == 0


def test_what_is_known_until_then_is_kept():
    net = nn.Linear(4, 2)
    profiler = profiler_of(lambda: net(torch.ones(3, 4)).sum().backward(), net, None, 60, "")

    @interruptible
    def run() -> None:
        for _ in profiler.run():
            if profiler.result().splits:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert profiler.result().share("forward") > 0
    assert "Interrupted" in profiler.result().report().to_text()
