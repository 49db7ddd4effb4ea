"""Training is undone byte for byte, under any optimizer."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from isolation import isolated
from torch import nn

from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.state.walk import Walk
from speedkit_jupyter.torchglue.private import tree_map

OPTIMIZERS = {
    "adam": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "sparse": lambda p: torch.optim.Adagrad(p, 0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=2),
}


class Network(nn.Module):
    """Dropout, batch norm, an embedding, and a buffer that each pass replaces."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, sparse=sparse)
        self.norm, self.drop, self.out = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, index: torch.Tensor) -> Any:
        self.seen = self.seen + 1
        self.passes = getattr(self, "passes", 0) + 1
        return self.out(self.drop(self.norm(self.table(index))))


def train(network: Network, optimizer: Any, scaler: Any, steps: int) -> None:
    for _ in range(steps):
        index = torch.randint(6, (5,))

        def closure(index: torch.Tensor = index) -> torch.Tensor:
            optimizer.zero_grad()
            loss = network(index).pow(2).mean()
            scaler.scale(loss).backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            scaler.step(optimizer)
            scaler.update()
        optimizer.param_groups[0]["lr"] *= 0.9
    np.random.rand(2)
    random.random()


def exactly(one: Any) -> Any:
    return one.detach().to_dense().tolist() if isinstance(one, torch.Tensor) else one


def everything(network: Network, optimizer: Any, scaler: Any) -> str:
    """Return all values, and the identity of parameters and gradients."""
    gradients = [(id(p), id(p.grad), p.grad) for p in network.parameters()]
    values = network.state_dict(), vars(network), optimizer.state_dict(), scaler.state_dict()
    modes = [part.training for part in network.modules()]
    drawn = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    return str(tree_map(exactly, [gradients, values, modes, drawn]))


@examples(40)
@given(
    kind=st.sampled_from(sorted(OPTIMIZERS)),
    scaled=st.booleans(),
    before=st.integers(0, 2),
    during=st.integers(1, 3),
    ends=st.sampled_from([None, ValueError, KeyboardInterrupt]),
)
def test_training_inside_leaves_no_trace(kind, scaled, before, during, ends):
    torch.manual_seed(0)
    network = Network(kind == "sparse")
    optimizer = OPTIMIZERS[kind](list(network.parameters()))
    scaled = scaled and kind in ("adam", "momentum")
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    train(network, optimizer, scaler, before)
    found = everything(network, optimizer, scaler)
    with contextlib.suppress(ValueError, KeyboardInterrupt), isolated(network, optimizer, scaler):
        network.eval()
        network.train()
        train(network, optimizer, scaler, during)
        network.drop.eval()
        if ends is not None:
            raise ends
    assert everything(network, optimizer, scaler) == found


@pytest.mark.parametrize("made", ["before", "inside"])
def test_a_scaler_in_the_middle_of_a_step_is_put_back(made):
    network = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    if made == "before":
        scaler.scale(network(torch.ones(1, 2)).sum()).backward()
    state = Snapshot(Walk([network, optimizer, scaler]))
    before = (scaler.state_dict(), len(scaler._per_optimizer_states))
    scaler.scale(network(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    state.restore()
    assert (scaler.state_dict(), len(scaler._per_optimizer_states)) == before
    scaler.scale(network(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)  # would raise after an unscale_ that was not undone
    scaler.update()
