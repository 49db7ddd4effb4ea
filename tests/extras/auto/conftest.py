"""Provide a training loop whose simulated step time depends on the plan in force."""

from functools import partial

import pytest
import torch
from torch import nn

from speedkit_jupyter.extras.auto.auto import Auto


@pytest.fixture
def bf16_machine(machine):
    machine("cpu_avx512_bf16")


class Net(nn.Module):
    """A network whose call takes 20 ms, or 10 ms under autocast."""

    def __init__(self, clock, dropout=0.0):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 16), nn.Dropout(dropout), nn.Linear(16, 2)
        self.clock, self.lowered_s, self.factor = clock, 0.01, 1.0

    def __deepcopy__(self, memo):
        other = Net(self.clock)
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, x):
        lowered = torch.is_autocast_enabled("cpu")
        self.clock.sleep(self.lowered_s if lowered else 0.02)
        y = self.last(self.drop(self.first(x).relu()))
        return y * self.factor if lowered else y


@pytest.fixture
def make_net(made_time, bf16_machine):
    return partial(Net, made_time)


@pytest.fixture
def loop(made_time, bf16_machine):
    """Return a network, its optimizer, and a function that trains it for some steps."""
    net = Net(made_time)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    def train(steps, shapes=(4,)):
        for number in range(steps):
            x = torch.rand(shapes[number % len(shapes)], 8)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), torch.zeros(len(x), dtype=torch.long)).backward()
            optimizer.step()

    return net, optimizer, train


@pytest.fixture
def running():
    auto = Auto(say=lambda line: auto.lines.append(line))
    auto.lines = []
    auto.begin()
    auto.begin_cell()
    yield auto
    auto.end()
