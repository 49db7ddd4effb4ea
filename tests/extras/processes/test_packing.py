"""Objects reach workers unchanged, and workers' changes come back into the same objects."""

import functools
import random
import threading
from collections import OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("cloudpickle")

from speedkit_jupyter.extras.processes.launching import names_of
from speedkit_jupyter.extras.processes.packing import Pickler, Reader, reply, taken, written


@pytest.fixture
def sent(tmp_path):
    """Return a function that sends an object and returns a worker's copy of it."""

    def one(value):
        pickler, failed = written(lambda: Pickler({}), lambda _: ["value"], lambda _: value)
        assert not failed
        pickler.save(tmp_path / "sent")
        return Reader(tmp_path / "sent", {}).read()["value"]

    return one


@pytest.fixture
def ran(tmp_path):
    """Return a function that runs a cell like a worker and returns failures by object name."""

    def run(cell, here):
        pickler, failed = written(lambda: Pickler(here), lambda _: [*here], here.get)
        assert not failed
        pickler.save(tmp_path / "sent")
        there = {}
        reader = Reader(tmp_path / "sent", there)
        there.update(reader.read())
        before = dict(there)
        exec(cell, there)
        new = {k: v for k, v in there.items() if before.get(k) is not v and k[:1] != "_"}
        stays = reply(tmp_path / "reply", new, reader.memo.copy(), there)
        bound, failed = taken(tmp_path / "reply", pickler.objects(), here)
        here |= bound
        return stays | failed

    return run


def test_tensors_and_arrays_arrive_with_their_strides_and_shared_memory(sent):
    base = torch.arange(12.0).view(3, 4)
    net = nn.Linear(4, 4)
    tied = nn.Sequential(net, nn.Linear(4, 4))
    tied[1].weight = net.weight
    array = np.eye(3)[:2].T
    every = torch.empty(0, 3), base.t()[1:], base, tied, array, array
    empty, view, whole, model, *arrays = sent(every)
    assert arrays[0] is arrays[1]
    assert np.array_equal(arrays[0], array)
    assert empty.shape == (0, 3)
    assert torch.equal(view, base.t()[1:])
    assert view.stride() == base.t()[1:].stride()
    whole.zero_()
    assert not view.any()
    assert base.any()
    assert model[0].weight is model[1].weight
    assert model[0].weight.requires_grad


class Trainer:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.optimizer = torch.optim.SGD(self.net[0].parameters(), 0.1, momentum=0.9)
        self.log = []

    def fit(self, x):
        self.net(x).sum().backward()
        self.optimizer.step()
        self.log.append(x)


X = torch.ones(1, 2)
FIFTH = random.Random(5).random()


def test_every_holder_of_a_model_holds_it_after_a_cell_too(ran):
    """Check that the optimizers, dicts and functions that hold a model stay the same objects."""
    trainer = Trainer()
    net, log, weight = trainer.net, trainer.log, trainer.net[0].weight
    before = weight.detach().clone()
    nets, step = {"D": net}, functools.partial(trainer.fit, X)
    here = {"step": step, "nets": nets, "view": before[1:]}
    assert ran("step(); nets['copy'] = nets['D']; view += 1", here) == {}
    assert not torch.equal(weight, before)
    assert trainer.net is nets["D"] is nets["copy"] is net
    assert trainer.log is log
    assert len(log) == 1
    assert trainer.optimizer.param_groups[0]["params"][0] is net[0].weight is weight
    assert list(trainer.optimizer.state) == [weight, net[0].bias]


class Pickles:
    __slots__ = ("held",)

    def __init__(self):
        self.held = []

    def __getstate__(self):
        return {"items": self.held}

    def __setstate__(self, state):
        self.held = state["items"]


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
        (lambda: nn.GRU(2, 2), "it.weight_ih_l0.data.zero_()", lambda it: len(it(X)) == 2),
        (lambda: nn.Linear(2, 2), "it.half()", lambda it: it.weight.dtype == torch.half),
        (lambda: nn.Linear(2, 2), "it.bias = None", lambda it: it.bias is None),
        (lambda: Pickles(), "it.held.append(1)", lambda it: it.held == [1]),
        (lambda: ([], 1), "it[0].append(2)", lambda it: it == ([2], 1)),
    ],
)
def test_a_change_comes_back_into_the_same_object(ran, make, change, is_so):
    value = make()
    here = {"it": value, "held": {"it": value}, "X": X}
    assert ran(change, here) == {}
    assert here["it"] is here["held"]["it"] is value
    assert is_so(value)


def test_an_unchanged_object_stays_untouched(ran):
    leaf = torch.ones(2, requires_grad=True)
    result, version, marker = leaf * leaf, leaf._version, object()
    here = {"leaf": leaf, "result": result, "marker": marker, "held": [marker]}
    assert ran("same = held[0] is marker and not result.requires_grad", here) == {}
    assert here["same"]
    assert here["marker"] is here["held"][0] is marker
    assert leaf._version == version
    result.sum().backward()
    assert leaf.grad is not None


def test_a_group_that_grows_and_a_new_head_come_back(ran):
    trainer = Trainer()
    here = {"net": trainer.net, "opt": trainer.optimizer, "nn": nn}
    ran("opt.add_param_group({'params': net[1].parameters()}); net[1] = nn.Linear(2, 5)", here)
    assert len(trainer.optimizer.param_groups) == 2
    assert trainer.net(X).shape == (1, 5)


def test_an_object_that_cannot_come_back_is_named_and_the_rest_comes(ran):
    trainer = Trainer()
    here = {"trainer": trainer, "lock": threading.Lock, "x": X}
    stays = ran("trainer.fit(x); trainer.bad = lock(); bad = lock(); good = [trainer.net]", here)
    assert [*stays] == ["bad", "trainer"]
    assert "lock" in stays["bad"]
    assert len(trainer.log) == 1
    assert here["good"] == [trainer.net]
    assert trainer.optimizer.state


def test_a_cached_function_of_a_cell_arrives_with_an_empty_cache_of_its_own(ran):
    cached = (
        "import functools\n@functools.lru_cache(5)\n"
        "def {0}(n):\n    return n if n < 2 else {0}(n - 1) + {0}(n - 2)\n"
    )
    here = {}
    exec(cached.format("there"), here)
    del here["__builtins__"]
    here["there"](7)
    ran(cached.format("back") + "size, found = there.cache_info().currsize, there(30)", here)
    assert (here["size"], here["found"], here["back"](30)) == (0, 832040, 832040)
    assert here["back"].cache_parameters()["maxsize"] == 5


def test_functions_classes_and_modules_of_a_cell_come_back(ran):
    here = {}
    ran("import math\nclass A: pass\ndef f(x): return x + y\ny = 2\na = A()", here)
    assert here["f"](1) == 3
    assert type(here["a"]) is here["A"]
    here["y"] = 5
    assert here["f"](here["math"].floor(1.5)) == 6


def test_the_names_of_a_cell_are_the_globals_of_its_code():
    read, bound = names_of("import os\ndef f(a):\n    return a + b\nc = f(d)\ne += 1\n")
    assert read == {"b", "c", "d", "e", "f", "os"}
    assert bound == {"os", "f", "c", "e"}
    read, _ = names_of("get_ipython().run_line_magic('time', 'train(model)')")
    assert {"train", "model"} < read


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
def test_an_object_that_would_arrive_changed_is_not_sent(value, why):
    _, failed = written(lambda: Pickler({}), lambda _: ["value"], lambda _: value())
    assert why in failed["value"]


def test_an_optimizer_of_any_class_arrives_with_its_own_attributes(ran):
    here = {"net": nn.Linear(2, 1), "x": torch.ones(3, 2)}
    net = here["net"]
    here["opt"] = torch.optim.LBFGS(net.parameters(), lr=0.1)
    before = net.weight.clone()
    cell = (
        "def closure():\n    opt.zero_grad()\n    loss = net(x).square().mean()\n"
        "    loss.backward()\n    return loss\nopt.step(closure)"
    )
    assert ran(cell, here) == {}
    assert not torch.equal(before, net.weight)
    assert here["opt"]._params[0] is net.weight
