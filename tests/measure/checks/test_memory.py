"""Peaks of memory, and where copies are kept."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import nn

from speedkit_jupyter.measure.checks import memory
from speedkit_jupyter.measure.undo.snapshot import Snapshot
from speedkit_jupyter.measure.undo.walk import Walk

CPU = torch.device("cpu")
MIB = 2**20


def test_the_peak_is_the_most_that_is_held_at_once_beyond_the_state():
    def step() -> None:
        first = torch.empty(MIB, dtype=torch.uint8)
        second = torch.empty(2 * MIB, dtype=torch.uint8)
        del first
        del second
        torch.empty(MIB, dtype=torch.uint8)

    held = [torch.empty(5 * MIB, dtype=torch.uint8)]
    found = memory.needed(step, CPU, held)
    assert found.state_bytes == 5 * MIB
    assert 8 * MIB <= found.peak_bytes < 8 * MIB + 2**16
    assert found.reserved_bytes is None


def test_a_smaller_batch_needs_less():
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    peaks = []
    for batch in (8, 512):
        x = torch.rand(batch, 64)
        step = lambda x=x: network(x).sum().backward()  # noqa: E731
        peaks.append(memory.needed(step, CPU, network.parameters()).peak_bytes)
    assert peaks[0] < peaks[1]


def test_state_is_parameters_buffers_gradients_and_optimizer_state_each_once():
    network = nn.Sequential(nn.Linear(10, 10, bias=False), nn.BatchNorm1d(10, affine=False))
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    network(torch.rand(4, 10)).sum().backward()
    optimizer.step()
    tensors = memory.state_tensors([network], [optimizer])
    assert memory.size([*tensors, *tensors]) == 3 * 400 + 40 + 40 + 8


def test_copies_off_the_device_put_back_the_same_values():
    network = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(network.parameters())

    def train() -> None:
        network(torch.rand(2, 4)).sum().backward()
        optimizer.step()

    train()
    before = [one.detach().clone() for one in memory.state_tensors([network], [optimizer])]
    state = Snapshot(Walk([network, optimizer]), off_device=True)
    train()
    state.restore()
    assert all(map(torch.equal, before, memory.state_tensors([network], [optimizer])))


def test_what_the_allocator_says_about_older_blocks_is_not_shown_and_all_else_is(capfd):
    old = [torch.rand(64) for _ in range(1001)]  # it warns of the first in every 1000

    def step():
        old.clear()
        os.write(2, b"from C++\n")
        print("from Python", file=sys.__stderr__, flush=True)

    memory.needed(step, CPU, ())
    shown = capfd.readouterr().err
    assert "CPUAllocator" not in shown
    assert shown.splitlines() == ["from C++", "from Python"]
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_a_step_that_fails_leaves_stderr_as_it_was(capfd):
    def step():
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        memory.needed(step, CPU, ())
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"
