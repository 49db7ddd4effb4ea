"""Test the measured peak memory and state size of a step; a running profiler hides the peak."""

import torch
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.step import memory

CPU = torch.device("cpu")
MIB = 2**20


def test_the_peak_is_the_most_that_is_held_at_once_beyond_the_state():
    def step() -> None:
        first = torch.empty(MIB, dtype=torch.uint8)
        second = torch.empty(2 * MIB, dtype=torch.uint8)
        del first
        del second
        torch.empty(MIB, dtype=torch.uint8)

    found = memory.needed(step, CPU, [torch.empty(5 * MIB, dtype=torch.uint8)])
    assert found.state_bytes == 5 * MIB
    assert 8 * MIB <= found.peak_bytes < 8 * MIB + 2**16


def test_state_is_parameters_buffers_gradients_and_optimizer_state_each_once():
    network = nn.Sequential(nn.Linear(10, 10, bias=False), nn.BatchNorm1d(10, affine=False))
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    network(torch.rand(4, 10)).sum().backward()
    optimizer.step()
    tensors = memory.state_tensors([network], [optimizer])
    assert memory.size([*tensors, *tensors]) == 3 * 400 + 40 + 40 + 8


def test_beside_a_profiler_of_the_users_own_the_peak_is_not_known_and_theirs_goes_on():
    net = nn.Linear(4, 4)

    def profiled() -> None:
        with torch.profiler.profile() as trace:
            net(torch.ones(2, 4)).sum().backward()
        assert "aten::addmm" in {event.name for event in trace.events()}

    assert memory.needed(profiled, CPU, []).peak_bytes is None
    found = benchmark(profiled, "baseline,fused_optimizer", model=net, budget_s=1).baseline
    assert found.memory is None or found.memory.peak_bytes is None
    with torch.profiler.profile() as theirs:
        assert memory.needed(lambda: net(torch.ones(2, 4)), CPU, []).peak_bytes is None
        torch.ones(3, 3) @ torch.ones(3, 3)
    assert "aten::mm" in {event.name for event in theirs.events()}
    assert memory.needed(lambda: net(torch.ones(2, 4)), CPU, []).peak_bytes > 0
