"""Graphs and memory of before: put back, or named where the step uses them, and only there."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from _kinds import PRELUDE
from _tensor_kinds import FAMILIES
from torch import nn

from speedkit_jupyter.measure.checks import memory
from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.optimizations.properties.memory_layout import restride
from speedkit_jupyter.support.storage import is_in_memory, size_in_memory

TRIED = [
    (family, *(part.strip() for part in row.split(" | ")))
    for family, table in FAMILIES.items()
    for row in table.strip().splitlines()
]
# What happened to it by itself is not what matters: it is a graph of before, and so it is named.
GRAPH = "a graph of autograd from before"


def said(step: Any, calls: int = 2) -> list[str]:
    """What is named of what some steps do, which a rewind and a return undo."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measured = step_of(step)
        with measured.isolated() as visit:
            for _ in range(calls):
                measured.rewind()
                step()
                visit.state.restore()
    return [str(one.message) for one in caught if "put back" in str(one.message)]


def in_a_namespace(before: str, step: str) -> dict[str, Any]:
    """What was run by hand, and the step as a function."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(f"{PRELUDE}\n{before}", names)
    lines = "\n    ".join(step.splitlines())
    bound = "global loss, out, hidden, total, losses, epoch, feats, y"
    exec(f"def step():\n    {bound}\n    {lines}", names)
    return names


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("family", "name", "before", "step", "probe"), TRIED, ids=[f"{f}: {n}" for f, n, *_ in TRIED]
)
@pytest.mark.filterwarnings("ignore")
def test_it_is_as_before_or_it_is_named(
    family: str, name: str, before: str, step: str, probe: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    names = in_a_namespace(before, step)
    then = repr(eval(probe, names))
    exec(f"model, optimizer, x = fresh()\n{before}", names)  # some probes use it up
    words = said(names["step"])
    assert repr(eval(probe, names)) == then or words


USUAL = {
    "a loss": "loss = model(x).pow(2).mean(); loss.backward()",
    "a loss in a branch": "if len(d) >= 0:\n    loss = model(x).sum()\nloss.backward()",
    "outputs and a loss": "out = model(x); loss = out.pow(2).mean(); loss.backward()",
    "an attribute": "o.loss = model(x).mean(); o.loss.backward()",
    "an attribute of the model": "model.last = model(x); model.last.mean().backward()",
    "a key": "d['loss'] = model(x).mean(); d['loss'].backward()",
    "a whole dict": "out = {'loss': model(x).mean()}; out['loss'].backward()",
    "a list that grows": "loss = model(x).mean(); loss.backward(); losses.append(loss)",
    "a printed loss": "total = float(loss); loss = model(x).mean(); loss.backward()",
    "a hidden state that is detached": "hidden = model(x + hidden.detach().sum())",
    "hidden states that are detached": "hidden = tuple(h.detach() for h in hidden)\n"
    "hidden = (model(x + hidden[0].sum()),)",
    "a hidden state that a function detaches": "hidden = cut(hidden)\n"
    "hidden = model(x + hidden.sum())",
    "only its shape": "torch.zeros(feats.shape)",
    "only detached": "model(x + feats.detach().sum()).sum().backward()",
    "a name that is deleted": "del y; y = model(x)",
    "a mean that is shown": "print(loss.item(), end=''); loss = model(x).mean(); loss.backward()",
}
BEFORE = """
o, d, losses, total = Plain(), {}, [], 0
loss = model(x).mean(); out = model(x); feats = model(x); y = model(x)
o.loss, d['loss'], model.last = model(x).mean(), model(x).mean(), model(x)
losses.append(loss); epoch = 0
def cut(h): return h.detach() if isinstance(h, torch.Tensor) else tuple(map(cut, h))
hidden = model(x)
"""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("step", USUAL.values(), ids=USUAL)
def test_what_a_step_leaves_and_binds_anew_is_not_named(step: str, capsys: Any) -> None:
    many = "hidden = (hidden,)" if "for h in hidden" in step else ""
    names = in_a_namespace(f"{BEFORE}\n{many}", step)
    assert said(names["step"]) == []


USED = {
    "a backward pass": "loss.backward(retain_graph=True)",
    "as an input": "(model(x) + feats).sum().backward(retain_graph=True)",
    "the elements of a list": "sum(losses).backward(retain_graph=True)",
    "an attribute": "o.loss.backward(retain_graph=True)",
    "a key": "d['loss'].backward(retain_graph=True)",
    "written into": "y.mul_(2)",
    "added to by name": "y += 1",
    "a hidden state that goes on": "hidden = model(x + hidden.sum())",
}


@pytest.mark.parametrize("step", USED.values(), ids=USED)
def test_a_graph_of_before_that_is_used_is_named(step: str) -> None:
    names = in_a_namespace(BEFORE, step)
    assert any(GRAPH in line for line in said(names["step"]))


def test_a_graph_is_named_before_the_step_runs() -> None:
    weight = torch.ones(3, requires_grad=True)
    features = (weight * 2).exp()
    ran: list[int] = []

    def step() -> None:
        ran.append(1)
        features.sum().backward(retain_graph=True)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Warning, match="features"), step_of(step).isolated():
            step()
    assert ran == []


def test_what_a_step_trains_does_not_spoil_a_graph_of_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(3, 4)
    loss = model(inputs).pow(2).mean()
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)

    def step() -> None:
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert said(step) == []
    loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_a_gradient_behind_a_graph_of_many_nodes_is_put_back() -> None:
    weight = torch.ones(2, requires_grad=True)
    features = weight * 1
    for _ in range(3000):
        features = features + 1

    def step() -> None:
        features.sum().backward(retain_graph=True)

    said(step)
    assert weight.grad is None


def given_back(tensor: torch.Tensor) -> torch.Tensor:
    """The same, without memory."""
    tensor.untyped_storage().resize_(0)
    return tensor


WITHOUT = {
    "plain": lambda: given_back(torch.ones(4)),
    "a view": lambda: given_back(torch.ones(4)[1:]),
    "expanded": lambda: given_back(torch.ones(1).expand(4)),
    "strided": lambda: given_back(torch.ones(4, 4).t()[::2]),
    "a parameter": lambda: nn.Parameter(given_back(torch.ones(4))),
}
WITH = {
    "plain": lambda: torch.ones(4),
    "empty": lambda: torch.ones(0),
    "a scalar": lambda: torch.tensor(1.0),
    "a view": lambda: torch.ones(9)[4:],
    "expanded": lambda: torch.ones(1).expand(9),
    "transposed": lambda: torch.ones(2, 3).t(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "CSR": lambda: torch.eye(3).to_sparse_csr(),
    "lazy": lambda: nn.LazyLinear(3).weight,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
}


@pytest.mark.parametrize("make", WITHOUT.values(), ids=WITHOUT)
def test_a_tensor_without_memory_is_known_and_counts_no_bytes(make: Any) -> None:
    tensor = make()
    assert not is_in_memory(tensor)
    assert size_in_memory(tensor) == memory.size([tensor]) == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", WITH.values(), ids=WITH)
def test_a_tensor_with_memory_is_known(make: Any) -> None:
    assert is_in_memory(make())


def test_what_has_no_memory_is_laid_out_without_being_read() -> None:
    state = given_back(torch.ones(2, 3, 4, 4))
    restride(state, (48, 1, 12, 3))
    assert state.stride() == (48, 1, 12, 3)
    assert state.untyped_storage().nbytes() == 0
