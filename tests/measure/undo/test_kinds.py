"""The registry of kinds: what is found is copied, changed, put back, and compared by the same."""

from __future__ import annotations

import array
import collections
import copy
import functools
import itertools
import random
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from speedkit_jupyter.measure.undo import isolation
from speedkit_jupyter.measure.undo.isolation import State
from speedkit_jupyter.measure.undo.kinds import base
from speedkit_jupyter.measure.undo.walk import Walk


class Plain:
    """An object with a number, a list, and a class attribute."""

    every: list[int] = []

    def __init__(self) -> None:
        self.n, self.log = 0, [[]]


class Slotted:
    """One attribute that has a value and one that has none."""

    __slots__ = ("late", "n")

    def __init__(self) -> None:
        self.n = 0


class Listed(list):
    """A list with attributes."""


def counting():
    """A function that rebinds a variable around it."""
    n = 0

    def up() -> None:
        nonlocal n
        n += 1

    return up, lambda: n


def fused():
    """A loose parameter and its optimizer."""
    z = nn.Parameter(torch.ones(2))
    return z, torch.optim.AdamW([z], fused=True)


def fused_step(pair):
    z, optimizer = pair
    z.sum().backward()
    optimizer.step()


# What there is, what changes it, and what is looked at.
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "list": (lambda: [[]], lambda o: o[0].append(1), lambda o: o),
    "deep": (lambda: {"a": {"b": ([{"c": []}],)}}, lambda o: o["a"]["b"][0][0]["c"].append(1), id),
    "33rd": (lambda: [[] for _ in range(40)], lambda o: o[33].append(1), lambda o: o),
    "order": (lambda: {"a": 1, "b": 2}, lambda o: o.update(a=o.pop("a")), list),
    "ordered": (lambda: collections.OrderedDict(a=1, b=2), lambda o: o.move_to_end("a"), list),
    "deque": (lambda: collections.deque([1, 2], 2), lambda o: o.append(3), list),
    "defaultdict": (lambda: collections.defaultdict(list), lambda o: o["x"], dict),
    "set": (lambda: {1}, lambda o: o.add(2), set),
    "array": (lambda: array.array("d", [1]), lambda o: o.append(2), list),
    "bytearray": (lambda: bytearray(b"a"), lambda o: o.append(2), bytes),
    "object": (Plain, lambda o: (setattr(o, "n", 1), o.log[0].append(1)), lambda o: vars(o)),
    "new attribute": (Plain, lambda o: setattr(o, "late", 1), lambda o: sorted(vars(o))),
    "class": (Plain, lambda o: type(o).every.append(1), lambda o: type(o).every),
    "slots": (Slotted, lambda o: setattr(o, "late", 1), lambda o: hasattr(o, "late")),
    "list with attributes": (Listed, lambda o: setattr(o, "n", 1), lambda o: sorted(vars(o))),
    "namespace": (lambda: types.SimpleNamespace(n=0), lambda o: setattr(o, "n", 1), vars),
    "nonlocal": (counting, lambda o: o[0](), lambda o: o[1]()),
    "partial": (
        lambda: functools.partial(list.append, []), lambda o: o(1), lambda o: o.args[0],
    ),
    "tensor": (lambda: torch.zeros(2), lambda o: o.add_(1), lambda o: o.tolist()),
    "data": (lambda: torch.zeros(2), lambda o: o.data.add_(1), lambda o: o.tolist()),
    "numpy()": (lambda: torch.zeros(2), lambda o: o.numpy().fill(1), lambda o: o.tolist()),
    "minus zero": (lambda: torch.zeros(2), lambda o: o.neg_(), lambda o: o.numpy().tobytes()),
    "resize_": (lambda: torch.zeros(2), lambda o: o.resize_(5).fill_(1), lambda o: o.tolist()),
    "smaller memory": (
        lambda: torch.ones(4), lambda o: o.untyped_storage().resize_(0), lambda o: o.tolist(),
    ),
    "expanded": (lambda: torch.zeros(1).expand(3), lambda o: o[:1].add_(1), lambda o: o.tolist()),
    "overlapping": (
        lambda: torch.zeros(4).unfold(0, 2, 1), lambda o: o[0].add_(1), lambda o: o.tolist(),
    ),
    "sparse": (
        lambda: torch.eye(3).to_sparse().coalesce(), lambda o: o.values().add_(1),
        lambda o: o.to_dense().tolist(),
    ),
    "csr": (
        lambda: torch.eye(3).to_sparse_csr(), lambda o: o.values().add_(1),
        lambda o: o.to_dense().tolist(),
    ),
    "inference": (
        lambda: torch.inference_mode()(torch.zeros)(3),
        lambda o: torch.inference_mode()(o.add_)(1), lambda o: o.tolist(),
    ),
    "hook": (
        lambda: nn.Linear(1, 1), lambda o: o.register_forward_hook(lambda *a: None),
        lambda o: len(o._forward_hooks),
    ),
    "parameter hook": (
        lambda: nn.Parameter(torch.ones(1)), lambda o: o.register_hook(lambda g: g),
        lambda o: len(o._backward_hooks or ()),
    ),
    "gradient": (
        lambda: nn.Parameter(torch.ones(1)), lambda o: o.sum().backward(), lambda o: o.grad,
    ),
    "fused": (fused, fused_step, lambda o: (o[0].tolist(), o[0].grad, len(o[1].state))),
    "ndarray": (lambda: np.zeros(2), lambda o: o.fill(1), lambda o: o.tolist()),
    "objects": (
        lambda: np.array([[], [1]], dtype=object), lambda o: o[0].append(1), lambda o: o.tolist(),
    ),
    "reshaped": (lambda: np.zeros(4), lambda o: setattr(o, "shape", (2, 2)), lambda o: o.shape),
    "read-only": (
        lambda: np.frombuffer(bytearray(8), np.uint8), lambda o: o.fill(1), lambda o: o.tolist(),
    ),
    "Random": (lambda: random.Random(0), lambda o: o.random(), lambda o: o.getstate()),
    "Generator": (
        lambda: np.random.default_rng(0), lambda o: o.random(), lambda o: o.bit_generator.state,
    ),
    "torch.Generator": (
        torch.Generator, lambda o: torch.rand(1, generator=o), lambda o: o.get_state().tolist(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_changed_is_noticed_and_put_back_again_and_again(kind):
    make, change, look = KINDS[kind]
    found = make()
    before = copy.deepcopy(look(found))
    state = State(others=[found])
    assert state.holds()
    for _ in range(2):
        change(found)
        state.restore()
        assert look(found) == before
    assert not state.failed
    assert state.changing


def nested() -> st.SearchStrategy[Any]:
    """Containers of containers, objects, tensors and arrays, to any depth."""
    leaves = st.one_of(
        st.integers(), st.text(max_size=3), st.builds(Plain), st.builds(Slotted),
        st.builds(lambda n: torch.arange(float(n)), st.integers(0, 4)),
        st.builds(lambda n: np.arange(float(n)), st.integers(0, 4)),
        st.builds(random.Random, st.integers(0, 9)),
    )  # fmt: skip
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(st.text(max_size=2), inner, max_size=4),
            st.lists(inner, max_size=3).map(tuple),
            st.lists(inner, max_size=3).map(collections.deque),
            inner.map(lambda one: types.SimpleNamespace(one=one)),
            inner.map(lambda one: functools.partial(print, one, key=[one])),
        ),
        max_leaves=20,
    )


def spoil(found: Any) -> None:
    """Change everything that can be changed, by what it offers."""
    for one in Walk([found]).near:
        if isinstance(one, torch.Tensor):
            one.data.add_(1)
        elif isinstance(one, np.ndarray):
            one += 1
        elif isinstance(one, random.Random):
            one.random()
        elif isinstance(one, list | collections.deque):
            one.append(object())
        elif isinstance(one, dict):
            one["spoilt"] = object()
        elif isinstance(one, Slotted):
            one.n, one.late = object(), 1


def picture(found: Any) -> Any:
    """Values and identities of all that is reached."""
    seen = []
    for one in Walk([found]).near:
        if isinstance(one, torch.Tensor | np.ndarray):
            seen.append((id(one), one.tolist()))
        elif isinstance(one, random.Random):
            seen.append((id(one), hash(one.getstate())))
        elif isinstance(one, dict):
            seen.append((id(one), [(key, id(value)) for key, value in one.items()]))
        elif isinstance(one, list | tuple | collections.deque):
            seen.append((id(one), list(map(id, one))))
        elif isinstance(one, Slotted):
            seen.append((id(one), id(one.n), hasattr(one, "late")))
    return seen


@given(nested())
def test_nested_structures_of_any_shape_come_back(found):
    before = picture(found)
    state = State(others=[found])
    spoil(found)
    state.restore()
    assert picture(found) == before
    assert not state.failed


def test_a_cycle_ends_and_comes_back():
    found: list[Any] = []
    found.append(found)
    state = State(others=[found])
    found.append(1)
    state.restore()
    assert len(found) == 1
    assert found[0] is found


def test_what_fails_is_named_and_keeps_nothing_else_from_being_put_back():
    class Refusing(random.Random):
        def setstate(self, state: Any) -> None:
            raise RuntimeError("no way back")

    found = {"one": Refusing(1), "other": [], "tensor": torch.zeros(1)}
    state = State(others=[found])
    found["one"].random()
    found["other"].append(1)
    found["tensor"].add_(1)
    state.restore()
    assert found["other"] == []
    assert found["tensor"].item() == 0
    assert state.failed == {"['one']": "could not be put back (RuntimeError: no way back)"}


def test_what_fails_to_be_copied_is_named_and_the_rest_is_put_back():
    class Shut(random.Random):
        def getstate(self) -> Any:
            raise RuntimeError("closed")

    found = [Shut(), []]
    state = State(others=[found])
    found[1].append(1)
    state.restore()
    assert found[1] == []
    assert state.failed == {"[0]": "can't be copied (RuntimeError: closed)"}


def test_what_is_too_large_is_watched(monkeypatch):
    monkeypatch.setattr(base, "MOST_BYTES", 1000)
    model = nn.Linear(20, 20)
    data, rows = torch.zeros(300), np.zeros(300)
    state = State([model], others=[{"data": data, "rows": rows}])
    assert state.too_large() == ["['data'] (Tensor)", "['rows'] (ndarray)"]
    assert state.written() == []
    data[7] = 1
    rows[7] = 1
    assert state.written() == ["['data']", "['rows']"]
    weight = model.weight.detach().clone()
    model.weight.data.add_(1)
    state.restore()
    assert torch.equal(model.weight, weight)  # a parameter is copied whatever its size


def test_a_walk_that_finds_too_much_says_where_it_ended():
    near: list[int] = []
    walk = Walk([[[] for _ in range(9000)], {"near": near}], most=3000)
    assert walk.cut
    assert id(near) in walk.found  # large containers come last


def test_of_a_later_state_only_what_changes_is_put_back_and_every_so_often_all():
    first, second = [0], [0]
    start = State(others=[first, second])
    first.append(1)
    start.restore()
    warm = State(others=[first, second], base=start)
    for _ in range(isolation.FIRST):  # which show what changes: nothing of `second`
        first.append(1)
        warm.restore()
    first.append(1)
    second.append(1)
    warm.restore()
    assert (first, second) == ([0], [0, 1])
    for _ in range(isolation.ALL_EVERY):
        warm.restore()
    assert second == [0]


def test_copies_of_what_did_not_change_are_shared():
    data = torch.zeros(10)
    start = State(others=[data])
    again = State(others=[data], base=start)
    saved = [next(m for k, _, m in one._memories if k.bulky).saved for one in (start, again)]
    assert saved[0] is saved[1]


def test_a_walk_names_things_as_the_code_does():
    log = {"loss": [[]]}
    counter = itertools.count()
    holder = Plain()
    holder.it = counter

    def step() -> None:
        log["loss"].append(next(holder.it))

    walk = Walk([step])
    assert walk.name(log["loss"][0]) == "log['loss'][0]"
    assert walk.name(counter) == "holder.it"
