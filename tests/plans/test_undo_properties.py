"""Whatever is applied, nested, interrupted or restored in whatever order: all is as found."""

from __future__ import annotations

import random
import signal
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from speedkit_jupyter import SpeedConfig, apply_speedups
from speedkit_jupyter.machines import flags
from speedkit_jupyter.optimizations.fused_optimizer import FusedOptimizer


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        """(N, 6) to (N, 6)."""
        return self.second(torch.tanh(self.first(x)))


class Recurrent(nn.Module):
    """An LSTM whose last output is used."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True)

    def forward(self, x):
        """(N, T, 6) to (N, 5)."""
        return self.lstm(x)[0][:, -1]


MODELS = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 1), nn.Flatten()
        ),
        (3, 2, 5, 5),
    ),
    "tied": (Tied, (4, 6)),
    "lstm": (Recurrent, (2, 3, 6)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 4, 8)),
}
# A large eps: without it Adam makes whole steps of gradients that are nothing but rounding.
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3),
    "fused AdamW": lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "foreach": lambda p: torch.optim.SGD(p, 0.01, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01, eps=1e-3),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=2),
}
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "precision": st.sampled_from(["fp32", "bf16", "fp16"]),
        "tf32": st.sampled_from(["highest", "high", "medium"]),
        "sdpa": st.sampled_from(["math", "flash"]),
        "threads": st.sampled_from([1, 2]),
        "channels_last": st.booleans(),
        "fused_optimizer": st.booleans(),
        "grad_scaler": st.booleans(),
    },
)
EXACT = st.fixed_dictionaries(
    {"precision": st.just("fp32")},
    optional={
        "threads": st.just(1),
        "channels_last": st.booleans(),
        "fused_optimizer": st.booleans(),
    },
)
QUICK = examples(10)


def build(model: str, optimizer: str) -> tuple[nn.Module, Any, torch.Tensor]:
    """A model with an optimizer and a batch, always from the same seed."""
    torch.manual_seed(0)
    make, shape = MODELS[model]
    network = make()
    return network, OPTIMIZERS[optimizer](network.parameters()), torch.rand(shape)


def train(network: nn.Module, optimizer: Any, x: torch.Tensor, context: Any = None) -> None:
    """One step; under a context in its autocast."""

    def loss() -> torch.Tensor:
        if context is None:
            return network(x).float().pow(2).mean()
        with context.autocast():
            return network(x).float().pow(2).mean()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def settings_of(network: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Everything but the values: layout, dtype, device, class, hooks, keys, modes, settings."""
    return {
        "class": type(network),
        "attributes": [
            (name, sorted(module.__dict__), module.training)
            for name, module in network.named_modules()
        ],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in network.modules()
        ],
        "keys": list(network.state_dict()),
        "tensors": [
            (id(t), t.dtype, t.device, t.stride())
            for t in (*network.parameters(), *network.buffers())
        ],
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "defaults": dict(optimizer.defaults),
        "optimizer": {
            k: v for k, v in optimizer.__dict__.items() if k.startswith("_step_supports")
        },
        "step hooks": (
            len(optimizer._optimizer_step_pre_hooks),
            len(_global_optimizer_pre_hooks),
        ),
        "flags": dict(flags.snapshot()),
    }


def generators() -> tuple[Any, ...]:
    """The state of every random generator, in comparable form."""
    return (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def values_of(network: nn.Module) -> list[torch.Tensor]:
    """The trained values, copied."""
    return [t.detach().clone() for t in (*network.parameters(), *network.buffers())]


@QUICK
@given(
    model=st.sampled_from(sorted(MODELS)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    configs=st.lists(CONFIGS, min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    handed_over=st.booleans(),
    steps=st.booleans(),
)
def test_plans_restored_in_any_order_leave_everything_as_found(
    model, optimizer, configs, order, handed_over, steps
):
    network, its_optimizer, x = build(model, optimizer)
    if steps:
        train(network, its_optimizer, x)
    before, drawn = settings_of(network, its_optimizer), generators()
    contexts = [
        apply_speedups(
            network, SpeedConfig(**one), optimizer=its_optimizer if handed_over else None
        )[1]
        for one in configs
    ]
    values = values_of(network)
    order.shuffle(contexts)
    for context in contexts:
        context.restore()
    assert settings_of(network, its_optimizer) == before
    assert generators() == drawn
    assert all(map(torch.equal, values, values_of(network)))


@QUICK
@given(
    model=st.sampled_from(sorted(MODELS)),
    optimizer=st.sampled_from(["AdamW", "fused AdamW", "momentum", "foreach", "Adagrad"]),
    config=EXACT,
    before=st.integers(0, 2),
    during=st.integers(0, 2),
    after=st.integers(0, 2),
    handed_over=st.booleans(),
)
def test_training_across_apply_and_restore_is_the_plain_run(
    model, optimizer, config, before, during, after, handed_over
):
    network, its_optimizer, x = build(model, optimizer)
    network.eval()  # no dropout: its masks depend on the layout
    plain, plain_optimizer, _ = build(model, optimizer)
    plain.eval()
    for _ in range(before):
        train(network, its_optimizer, x)
    given_optimizer = its_optimizer if handed_over else None
    with apply_speedups(network, SpeedConfig(**config), optimizer=given_optimizer)[1] as context:
        for _ in range(during):
            train(network, its_optimizer, x, context)
    for _ in range(after):
        train(network, its_optimizer, x)
    for _ in range(before + during + after):
        train(plain, plain_optimizer, x)
    for ours, theirs in zip(network.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    for parameter, twin in zip(network.parameters(), plain.parameters(), strict=True):
        state, other = its_optimizer.state.get(parameter, {}), plain_optimizer.state.get(twin, {})
        strides = [v.stride() for v in state.values() if isinstance(v, torch.Tensor)]
        assert strides == [v.stride() for v in other.values() if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("when", ["apply", "restore"])
@pytest.mark.parametrize("how", ["interrupt", "exception"])
def test_half_way_through_apply_or_restore_nothing_is_left_half_done(monkeypatch, when, how):
    network, optimizer, _ = build("convolutions", "AdamW")
    before = settings_of(network, optimizer)
    real = FusedOptimizer.applied

    @contextmanager
    def failing(self, decision, target):
        with real(self, decision, target):
            if when == "apply":
                _fail(how)
            yield
        if when == "restore":
            _fail(how)

    monkeypatch.setattr(FusedOptimizer, "applied", failing)
    config = SpeedConfig(threads=1, sdpa="math", channels_last=True)
    with pytest.raises((KeyboardInterrupt, OSError)):
        apply_speedups(network, config, optimizer=optimizer)[1].restore()
    assert settings_of(network, optimizer) == before


def _fail(how: str) -> None:
    if how == "exception":
        raise OSError("half way")
    signal.raise_signal(signal.SIGINT)
