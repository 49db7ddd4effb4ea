"""Test Ctrl-C at any moment of a loop under `auto`."""

import itertools
import random
import signal
import threading

import pytest
import torch
from torch import nn

from speedkit_jupyter.extras.auto.auto import Auto
from speedkit_jupyter.extras.auto.race import BASELINE
from speedkit_jupyter.machines import flags
from speedkit_jupyter.plans import registry

pytestmark = pytest.mark.real_time


@pytest.fixture
def alarm():
    """Return a function: `alarm(2)` raises KeyboardInterrupt after 2 s, as Ctrl-C would."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        pytest.skip("no alarm here")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def train(net, optimizer, begin):
    """Train until the alarm raises. It is set repeatedly: Python drops errors in destructors."""
    for number in itertools.count():
        if number % 1000 == 0:
            begin()
        optimizer.zero_grad()
        net(torch.rand(8, 16)).square().mean().backward()
        optimizer.step()


def test_thirty_moments_leave_the_winner_or_the_plain_plan_and_then_nothing(machine, alarm):
    machine("cpu_avx512_bf16")
    draw = random.Random(0)
    for _ in range(30):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(net.parameters())
        before = flags.snapshot()
        auto = Auto(overhead=1.0)  # races from the first step on
        auto.begin()
        auto.begin_cell()
        with pytest.raises(KeyboardInterrupt):
            train(net, optimizer, lambda: alarm(draw.uniform(0.002, 0.12)))
        torch.set_grad_enabled(True)  # an interrupt may skip the exit of a no_grad() in torch
        auto.end_cell()
        for work in auto.loops:
            assert work.plans.in_force in (BASELINE, work.race.leader)
        auto.end()
        assert flags.snapshot() == before
        assert not registry.MEASURED
        assert not registry.APPLIED
        assert "_compiled_call_impl" not in vars(net)
        assert not optimizer.param_groups[0]["fused"]
        assert not hasattr(torch.autograd.backward, "stands_in_for")
