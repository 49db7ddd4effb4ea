"""Each kind of state is restored repeatedly, in the same objects and with the same contents."""

import collections
import functools
import multiprocessing
import random
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from speedkit_jupyter.state.handlers import base
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.state.walk import Walk
from speedkit_jupyter.torchglue.private import tree_map


class Case(NamedTuple):
    """`make` returns an object, `change` changes it as a step does, `look` returns its contents."""

    make: Callable[[], Any]
    change: Callable[[Any], Any]
    look: Callable[[Any], Any]


class Plain:
    total = 0

    def __init__(self) -> None:
        self.n, self.log = 0, [1]


class Stubborn(dict):  # type: ignore[type-arg]
    """Dict whose overridden methods can't be used to restore its contents."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, [value])

    clear = None


class Frozen(Plain):
    def __setattr__(self, name: str, value: Any) -> None:
        if "log" in vars(self):
            raise AttributeError("frozen")
        super().__setattr__(name, value)


class Counting(nn.Module):
    """Module whose attributes TorchScript moves into C++."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.total = 0, torch.zeros(1)
        self.seen = torch.jit.Attribute([], list[torch.Tensor])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        self.seen.append(x)
        self.total += 1
        return x


def bits(tensor: torch.Tensor) -> Any:
    kept = tensor.detach()
    dense = kept.to_dense() if kept.layout is not torch.strided else kept
    return str(kept.dtype), dense.stride(), str(dense.tolist()), kept.requires_grad


CASES: dict[str, list[Case]] = {
    "values of tensors": [
        Case(lambda: torch.tensor([0.0, float("nan"), -0.0]), lambda t: t.fill_(0), bits),
        Case(lambda: torch.zeros(1, 3).expand(4, 3), lambda t: t[0].add_(1), bits),
        Case(lambda: torch.zeros(4), lambda t: t.resize_(100).fill_(3), bits),
        Case(lambda: torch.zeros(3, dtype=torch.complex64), lambda t: t.add_(1j), bits),
    ],
    "layouts of tensors": [
        Case(lambda: torch.eye(3).to_sparse_csr(), lambda t: t.values().mul_(5), bits),
        Case(lambda: nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last).weight,
             lambda t: setattr(t, "data", t.data.contiguous() + 1), bits),
        Case(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
             lambda t: t.copy_(torch.zeros(3)), lambda t: t.dequantize().tolist()),
    ],
    "gradients": [
        Case(lambda: torch.ones(2, requires_grad=True), lambda t: t.register_hook(print),
             lambda t: t._backward_hooks),
    ],
    "modules": [
        Case(lambda: nn.Sequential(nn.Linear(1, 1)), lambda m: m.append(nn.ReLU()),
             lambda m: str(m)),
        Case(lambda: nn.Linear(1, 1), lambda m: setattr(m, "forward", print),
             lambda m: "forward" in vars(m)),
        Case(lambda: torch.jit.script(Counting()), lambda m: m.eval()(torch.ones(1)),
             lambda m: (m.n, m.seen, m.total, m.training)),
        Case(lambda: torch.jit.script(Counting()), lambda m: setattr(m, "total", torch.ones(1)),
             lambda m: m.total),
    ],
    "optimizers": [
        Case(lambda: torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1),
             lambda o: o.add_param_group({"params": torch.ones(2, requires_grad=True)}),
             lambda o: len(o.param_groups)),
    ],
    "containers": [
        Case(lambda: collections.OrderedDict(b=1, a=2), lambda d: d.move_to_end("b"), list),
        Case(lambda: Stubborn(a=1), lambda d: dict.update(d, b=2), lambda d: list(d.items())),
        Case(lambda: [[1], (2, [3])], lambda x: (x[0].append(1), x[1][1].clear()), str),
    ],
    "instances": [
        Case(Frozen, lambda f: vars(f).update(n=3), lambda f: f.n),
        Case(Plain, lambda p: object.__setattr__(p, "__class__", Frozen), lambda p: str(type(p))),
        Case(lambda: functools.partial(list.append, [1]), lambda f: f(2), lambda f: f.args),
        Case(lambda: Plain().log.append, lambda f: f(2), lambda f: f.__self__),
        Case(lambda: weakref.ref(Plain), lambda r: setattr(r(), "total", 9), lambda r: r().total),
    ],
    "arrays": [
        Case(lambda: np.zeros((2, 3)).T, lambda a: a.__setitem__(0, 1), lambda a: a.tolist()),
        Case(lambda: np.array([(1, 2.0)], "i4,f8"), lambda a: a.fill(0), lambda a: a.tolist()),
        Case(lambda: memoryview(bytearray(2)), lambda v: v.__setitem__(0, 1), bytes),
        Case(lambda: multiprocessing.Value("i"), lambda v: setattr(v, "value", 7),
             lambda v: v.value),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_what_a_step_changes_comes_back_again_and_again(kind: str) -> None:
    for make, change, look in CASES[kind]:
        found, untouched = make(), torch.ones(100)
        before = str(look(found))
        first = Snapshot(Walk([[found, untouched]]))
        for _ in range(3):
            change(found)
            later = str(look(found))
            assert later != before
            second = Snapshot(Walk([[found, untouched]]), base=first)
            first.restore()
            assert str(look(found)) == before, (kind, found)
        for _ in range(4):  # a later snapshot shares unchanged objects with the first
            change(found)
            second.restore()
        assert str(look(found)) == later, (kind, found)
        first.restore()
        assert not first.failed


def test_a_copy_for_timing_has_its_own_values_only_where_they_may_take_time() -> None:
    """Reuse the first snapshot's copy only of large tensors whose strides are unchanged."""
    large, small, turned = torch.zeros(1 << 18), torch.zeros(3), torch.zeros(512, 1024)
    walk = Walk([[large, small, turned]])
    first = Snapshot(walk)
    large += 1
    small += 1
    turned.data = torch.ones(1024, 512).t()
    second = Snapshot(walk, base=first, for_timing=True)
    for _ in range(4):
        for tensor in (large, small, turned):
            tensor += 5
        second.restore()
        assert [float(one.max()) for one in (large, small, turned)] == [0.0, 1.0, 1.0]
        assert turned.stride() == (1, 512)
    first.restore()
    assert [float(one.max()) for one in (large, small, turned)] == [0.0, 0.0, 0.0]
    assert turned.stride() == (1024, 1)


def test_tensors_keep_their_memory_and_their_graphs() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight**2).sum()  # a graph from before the snapshot
    address = weight.data_ptr()
    snapshot = Snapshot(Walk([[weight]]))
    weight.data = torch.zeros(3)
    with torch.no_grad():
        weight.add_(1)
    snapshot.restore()
    assert weight.data_ptr() == address
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 3


def test_one_failure_keeps_nothing_else_from_coming_back() -> None:
    array, log = np.zeros(4), [1]
    state = Snapshot(Walk([[array, log]]))
    array.shape = (2, 2)
    log.append(2)
    state.restore()
    assert log == [1]
    assert "could not be put back (ValueError" in next(iter(state.failed.values()))


@pytest.mark.parametrize("data", [torch.zeros(1000), np.zeros(1000)], ids=["tensor", "array"])
def test_data_that_is_too_large_is_named(monkeypatch: pytest.MonkeyPatch, data: Any) -> None:
    monkeypatch.setattr(base, "MOST_COPIED_BYTES", 100)
    assert any("data" in one for one in Snapshot(Walk([{"data": data}])).too_large)


def test_parameters_and_optimizer_state_are_copied_whatever_their_size(monkeypatch):
    monkeypatch.setattr(base, "MOST_COPIED_BYTES", 1)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = [str(model.state_dict()), str(optimizer.state_dict())]
    snapshot = Snapshot(Walk([model, optimizer]))
    optimizer.step()
    snapshot.restore()
    assert [str(model.state_dict()), str(optimizer.state_dict())] == before


OPTIMIZERS = {
    "adam": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "sparse": lambda p: torch.optim.Adagrad(p, 0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=2),
}


class Network(nn.Module):
    """Net with dropout, batch norm, an embedding, and a buffer that each pass replaces."""

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
)
def test_restored_training_leaves_no_trace(kind, scaled, before, during):
    torch.manual_seed(0)
    network = Network(kind == "sparse")
    optimizer = OPTIMIZERS[kind](list(network.parameters()))
    scaled = scaled and kind in ("adam", "momentum")
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    train(network, optimizer, scaler, before)
    found = everything(network, optimizer, scaler)
    snapshot = Snapshot(Walk((network, optimizer, scaler)))
    train(network, optimizer, scaler, during)
    network.drop.eval()
    snapshot.restore()
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
