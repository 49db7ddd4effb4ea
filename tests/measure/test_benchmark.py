"""The engine: what happens between the first block and the last."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    """A small convolutional network and its batch."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), torch.rand(2, 3, 9, 9)


@pytest.mark.parametrize("trained_before", [False, True])
def test_in_every_block_optimizer_state_and_gradients_lie_like_their_weights(trained_before):
    network, x = convolutions()
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    seen: SimpleQueue[Any] = SimpleQueue()  # no list: what a step appends is taken back

    def step() -> None:
        for p in network.parameters():
            tensors = [p.grad, *optimizer.state.get(p, {}).values()]
            found = {one.stride() for one in tensors if one is not None and one.dim()}
            seen.put((p.stride() if p is network[0].weight else None, found - {p.stride()}))
        network(x).pow(2).mean().backward()
        optimizer.step()

    if trained_before:
        step()
    names = "baseline,channels_last,channels_last+fused_optimizer"
    comparison = benchmark(step, names, model=network, optimizer=optimizer, budget_s=0.2)
    drained = [seen.get() for _ in range(seen.qsize())]
    assert not any(mispaired for _, mispaired in drained)
    assert len({layout for layout, _ in drained} - {None}) == 2
    assert all(one.accuracy.verdict in ("exact", "rounding") for one in comparison.records)


def test_a_variant_keeps_the_addresses_of_its_tensors_from_round_to_round():
    network, x = convolutions()
    seen: SimpleQueue[tuple[Any, int]] = SimpleQueue()

    def step() -> None:
        seen.put((network[0].weight.stride(), network[0].weight.data_ptr()))
        network(x).sum().backward()

    found = network[0].weight.data_ptr()
    benchmark(step, "baseline,channels_last", model=network, budget_s=0.3)
    drained = [seen.get() for _ in range(seen.qsize())]
    rounds = drained[len(drained) // 2 :]  # after warm-up and check, which move things
    assert len({layout for layout, _ in rounds}) == 2
    assert len({address for _, address in rounds}) == 2
    assert network[0].weight.data_ptr() == found
