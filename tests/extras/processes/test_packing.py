"""What is sent arrives as it was, and what comes back is in the same objects."""

from __future__ import annotations

import functools
import os
import random
import threading
import weakref
from collections import OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("cloudpickle")

from speedkit_jupyter.extras.processes.launching import names_of
from speedkit_jupyter.extras.processes.packing import Keys, Pickler, Reader
from speedkit_jupyter.extras.processes.returning import Received, taken, written


def sent(value, is_here=True):
    pickler = Pickler({}, Keys())
    assert not pickler.write(["value"], lambda name: value)
    parcel = pickler.sealed(is_here)
    try:
        return dict(Reader(parcel, {}).read())["value"]
    finally:
        parcel.close()


class Pair:
    """A notebook's names, `here`, and those of one worker, in this process."""

    def __init__(self, **here):
        self.here, self.there, self.stays, self.moving = here, {}, [], {}
        self._keys, self._objects = Keys(), weakref.WeakValueDictionary()

    def __getattr__(self, name):
        return self.here[name]

    def run(self, cell):
        pickler = Pickler(self.here, self._keys)
        assert not pickler.write([k for k in self.here if k[:1] != "_"], self.here.get)
        self.moving, parcel = pickler.moving, pickler.sealed(True)
        reader = Reader(parcel, self.there, self._objects)
        self.there.update(reader.read())
        received, before = Received(self.there, reader.known()), dict(self.there)
        exec(cell, self.there)
        new = {k: v for k, v in self.there.items() if before.get(k) is not v and k[:1] != "_"}
        made, found, stays = written(new, received, {}, {}, self.there)
        self._objects.update({(1, *key): one for key, one in found.items() if hasattr(one, "grad")})
        back = made.sealed(True)
        bound, failed = taken(back, pickler.known(), self.here, self._keys, 1)
        self.here |= bound
        self.stays = [*stays, *failed]
        parcel.close()
        back.close()
        return self


@pytest.mark.parametrize("is_here", [True, False])
def test_tensors_arrive_with_their_strides_and_what_they_share(is_here):
    base = torch.arange(12.0).view(3, 4)
    net = nn.Linear(4, 4)
    tied = nn.Sequential(net, nn.Linear(4, 4))
    tied[1].weight = net.weight
    empty, view, whole, model = sent((torch.empty(0, 3), base.t()[1:], base, tied), is_here)
    assert empty.shape == (0, 3)
    assert torch.equal(view, base.t()[1:])
    assert view.stride() == base.t()[1:].stride()
    whole.zero_()
    assert not view.any()
    assert base.any()
    assert model[0].weight is model[1].weight
    assert model[0].weight.requires_grad


def test_an_optimizer_arrives_with_the_parameters_of_its_model():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    net, adam = sent((model, optimizer))
    assert adam.param_groups[0]["params"][0] is net.weight
    assert torch.equal(adam.state[net.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_nothing_stays_open_once_a_parcel_is_closed():
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc") else 0
    sent(torch.ones(100))
    assert (len(os.listdir("/proc/self/fd")) if before else 0) <= before  # others' may be closed


class Trainer:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.optimizer = torch.optim.SGD(self.net[0].parameters(), 0.1, momentum=0.9)
        self.log, self.once = [], 1

    def fit(self, x):
        self.net(x).sum().backward()
        self.optimizer.step()
        self.log.append(x)
        self.__dict__.pop("once", None)


X = torch.ones(1, 2)
FIFTH = random.Random(5).random()


def test_what_holds_a_model_holds_it_after_a_cell_too():
    """An optimizer, dicts, lists, objects and functions; containers are the same objects."""
    trainer = Trainer()
    net, log, weight = trainer.net, trainer.log, trainer.net[0].weight
    before = weight.detach().clone()
    nets, step = {"D": net}, functools.partial(trainer.fit, X)
    Pair(step=step, nets=nets, view=before[1:]).run("step(); nets['copy'] = nets['D']; view += 1")
    assert not torch.equal(weight, before)
    assert trainer.net is nets["D"] is nets["copy"] is net
    assert trainer.log is log
    assert len(log) == 1
    assert not hasattr(trainer, "once")
    assert trainer.optimizer.param_groups[0]["params"][0] is net[0].weight is weight
    assert list(trainer.optimizer.state) == [weight, net[0].bias]


SEES = """
y = step()
trained = [k for k, p in net.named_parameters() for q in opt.param_groups[0]["params"] if p is q]
frozen = [not p.requires_grad for p in net.parameters()]
"""


@pytest.mark.parametrize(
    "change",
    [
        "opt = torch.optim.SGD(net[1].parameters(), 0.1)",
        "opt.param_groups[0]['params'] = list(net[1].parameters())",
        "net[0].requires_grad_(False)",
        "net[0].register_forward_hook(lambda module, given, made: made * 2)",
        "net[0] = nn.Linear(2, 2)",
        "net[0].forward = torch.sin",
        "net.add_module('more', nn.Tanh()); del net[0]",
        "net[0].weight.data.fill_(3.0)",
        "net[0].weight.data[:1].zero_()",
        "def step(): return 3.0",
    ],
)
def test_a_second_cell_sees_what_has_changed_here(change):
    trainer = Trainer()
    pair = Pair(net=trainer.net, opt=trainer.optimizer, X=X, torch=torch, nn=nn)
    exec("def step():\n    return net(X).sum().item()", pair.here)
    pair.run(SEES)
    kept = pair.there["net"]
    exec(change, pair.here)
    expected = {**pair.here}
    exec(SEES, expected)
    pair.run(SEES)
    assert pair.there["net"] is kept
    assert [pair.here[name] for name in ("y", "trained", "frozen")] == [
        expected[name] for name in ("y", "trained", "frozen")
    ]


@functools.lru_cache
def cached(number):
    return number if number < 2 else cached(number - 1) + cached(number - 2)


class Pickles:
    __slots__ = ("held", "lock")

    def __init__(self):
        self.held, self.lock = [], threading.Lock()

    def __getstate__(self):
        return self.held

    def __setstate__(self, state):
        self.__init__()
        self.held = state


@pytest.mark.parametrize(
    ("make", "change", "is_so"),
    [
        (lambda: [1], "it.append(2)", lambda it: it == [1, 2]),
        (lambda: {1: [2]}, "it[1].append(it)", lambda it: it[1] == [2, it]),
        (lambda: {1}, "it.add(2)", lambda it: it == {1, 2}),
        (lambda: deque([1], 2), "it.extend([2, 3])", lambda it: [*it, it.maxlen] == [2, 3, 2]),
        (lambda: bytearray(b"a"), "it += b'b'", lambda it: it == b"ab"),
        (lambda: defaultdict(list), "it[1].append(2)", lambda it: it == {1: [2]} and not it[3]),
        (lambda: OrderedDict(a=1, b=2), "it.move_to_end('a')", lambda it: [*it] == ["b", "a"]),
        (lambda: random.Random(1), "it.seed(5)", lambda it: it.random() == FIFTH),
        (lambda: torch.Generator(), "it.manual_seed(7)", lambda it: it.initial_seed() == 7),
        (lambda: torch.ones(2), "it.data.zero_()", lambda it: not it.any()),
        (lambda: torch.eye(2).to_sparse(), "it *= 2", lambda it: it.to_dense()[0, 0] == 2),
        (lambda: torch.ones(3).numpy(), "it[1] = 5", lambda it: it.tolist() == [1, 5, 1]),
        (lambda: nn.LazyLinear(2), "it(X)", lambda it: type(it) is nn.Linear and len(it(X)) == 1),
        (lambda: nn.Linear(2, 2), "it.half()", lambda it: it.weight.dtype == torch.half),
        (lambda: nn.Linear(2, 2), "it.bias = None", lambda it: it.bias is None),
        (lambda: Pickles(), "it.held.append(1)", lambda it: it.held == [1]),
        (lambda: ([], 1), "it[0].append(2)", lambda it: it == ([2], 1)),
    ],
)
def test_what_a_cell_changes_comes_back_into_the_same_object(make, change, is_so):
    value = make()
    pair = Pair(it=value, held={"it": value}, X=X).run(change)
    assert pair.stays == []
    assert pair.it is pair.held["it"] is value
    assert is_so(value)


def test_what_does_not_change_stays_untouched():
    leaf = torch.ones(2, requires_grad=True)
    result, version, marker = leaf * leaf, leaf._version, object()
    pair = Pair(leaf=leaf, result=result, marker=marker, held=[marker])
    pair.run("same = held[0] is marker and not result.requires_grad")
    assert pair.same
    assert pair.marker is pair.held[0] is marker
    assert leaf._version == version
    result.sum().backward()
    assert leaf.grad is not None


def test_a_group_that_grows_and_a_new_head_come_back():
    trainer = Trainer()
    pair = Pair(net=trainer.net, opt=trainer.optimizer, nn=nn, x=X)
    pair.run("opt.add_param_group({'params': net[1].parameters()}); net[1] = nn.Linear(2, 5)")
    assert len(trainer.optimizer.param_groups) == 2
    assert trainer.net(X).shape == (1, 5)


def test_what_cannot_come_back_is_named_and_the_rest_comes():
    trainer, moving = Trainer(), enumerate([1])
    pair = Pair(trainer=trainer, moving=moving, lock=threading.Lock, x=X)
    pair.run("trainer.fit(x); trainer.bad = lock(); bad = lock(); good = [trainer.net]")
    assert pair.stays == ["bad", "trainer"]
    assert list(pair.moving) == ["enumerate"]
    assert len(trainer.log) == 1
    assert pair.good == [trainer.net]
    assert trainer.optimizer.state


def test_a_cached_function_goes_and_comes():
    pair = Pair(fib=cached).run("y = fib(10); held = [fib]")
    assert pair.y == 55
    assert pair.held == [cached]


def test_the_names_of_a_cell_are_those_that_it_and_its_functions_read():
    read, bound = names_of("import os\ndef f(a):\n    return a + b\nc = f(d)\ne += 1\n")
    assert {"b", "d", "e", "f"} <= set(read)
    assert "a" not in read
    assert bound == {"os", "f", "c", "e"}


WHOLE = np.zeros((3, 3), dtype="f4")
QUANTIZED = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (lambda: (WHOLE, WHOLE[1]), "shares memory"),
        (lambda: {"t": torch.from_numpy(WHOLE), "a": WHOLE}, "shares memory"),
        (lambda: QUANTIZED, "quantized"),
    ],
    ids=["views", "a tensor of an array", "quantized"],
)
def test_what_would_arrive_otherwise_is_not_sent(value, why):
    pickler = Pickler({}, Keys())
    failed = pickler.write(["value"], lambda name: value())
    assert why in str(failed["value"])


def test_one_array_arrives_where_it_is_held_more_than_once():
    whole, parts = sent((WHOLE, [WHOLE]))
    assert whole is parts[0]
    assert np.array_equal(sent(WHOLE.T), WHOLE.T)


def test_an_optimizer_of_any_class_arrives_with_its_own_attributes():
    pair = Pair(net=nn.Linear(2, 1), x=torch.ones(3, 2))
    pair.here["opt"] = torch.optim.LBFGS(pair.net.parameters(), lr=0.1)
    before = pair.net.weight.clone()
    pair.run(
        "def closure():\n    opt.zero_grad()\n    loss = net(x).square().mean()\n"
        "    loss.backward()\n    return loss\nopt.step(closure)"
    )
    assert not torch.equal(before, pair.net.weight)
    assert pair.opt._params[0] is pair.net.weight
