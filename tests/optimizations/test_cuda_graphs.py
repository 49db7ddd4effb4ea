"""cuda_graphs: the same bits from replays as from calls, whatever the loop does in between.

What decides, keeps, puts back and counts runs here on a stand-in for the GPU (recorded_on_a_cpu);
the tests marked `gpu` are about the one file that calls torch.cuda.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import operator
import random
import threading
import weakref

import numpy as np
import pytest
import torch
from recorded_on_a_cpu import OnCpu
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, benchmark, code, plan
from speedkit_jupyter.machines import capture
from speedkit_jupyter.optimizations import cuda_graphs, named
from speedkit_jupyter.optimizations.facts.optimizers import OptimizerFacts
from speedkit_jupyter.optimizations.graphs import captured, graphed_calls
from speedkit_jupyter.optimizations.graphs.graphed_calls import GraphedCalls
from speedkit_jupyter.optimizations.properties.calls import layer_of
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.tuning.candidates import Candidate, joined

ENTRY = named("cuda_graphs")
ON = SpeedConfig(cuda_graphs=True).alone()
CUDA = Facts(
    device="cuda:0",
    devices=("cuda:0",),
    parameters=20_000_000,
    linears=40,
    optimizers=(OptimizerFacts(devices=("cuda:0",)),),
)


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """A CPU that can record."""
    monkeypatch.setitem(capture.KINDS, "cpu", OnCpu)
    monkeypatch.setattr(OnCpu, "made", [])
    monkeypatch.setattr(OnCpu, "failure", None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        return self.two(self.dropout(F.gelu(self.one(x))))


class Normed(Net):
    """Writes to buffers when it trains: statistics, and a spectral norm's vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.two = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3))

    def forward(self, x):
        return self.two(F.relu(self.norm(self.one(x))))


class Counting(Net):
    """Computes by what it counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return super().forward(x) * self.seen


class Heads(Net):
    """A dict, of which a loop uses some; parameters of the others get no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 2)

    def forward(self, x, scale=1.0, mask=None):
        x = F.relu(self.one(x)) * scale
        x = x if mask is None else x * mask
        return {"logits": self.two(x), "other": self.other(x), "kept": x.detach() + 0, "n": 3}


class Tied(nn.Module):
    """One weight in two places, and in place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, ids):
        return self.last(F.relu_(self.embedding(ids) * 2))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.block(x.unsqueeze(0)).squeeze(0).mul(1)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(),
        nn.Linear(6, 3),
    )  # fmt: skip


def ids() -> torch.Tensor:
    return torch.randint(7, (5,))


def rows() -> torch.Tensor:
    return torch.randn(5, 4)


MODELS = {
    "dropout": (Net, rows),
    "batch and spectral norm": (Normed, rows),
    "a counter": (Counting, rows),
    "heads": (Heads, rows),
    "tied weights": (Tied, ids),
    "attention": (Attention, rows),
    "convolutions": (convolutions, rows),
}


KEPT: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def seeded() -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)


def loss_of(result) -> torch.Tensor:
    result = result["logits"] if isinstance(result, dict) else result
    return result.float().pow(2).mean()


def plainly(model, batch, optimizer, step) -> list:
    optimizer.zero_grad()
    loss = loss_of(model(batch()))
    loss.backward()
    optimizer.step()
    return [loss]


def accumulating(model, batch, optimizer, step) -> list:
    losses = []
    for _ in range(2):
        losses.append(loss_of(model(batch())))
        losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=bool(step % 2))
    return losses


def together(model, batch, optimizer, step) -> list:
    """Two calls before the one backward pass that is of both."""
    optimizer.zero_grad()
    loss = loss_of(model(batch())) + loss_of(model(batch()))
    loss.backward()
    optimizer.step()
    return [loss]


def kept(model, batch, optimizer, step) -> list:
    """A backward pass twice through the same graph, with another call in between."""
    optimizer.zero_grad()
    loss = loss_of(model(batch()))
    loss.backward(retain_graph=True)
    other = loss_of(model(batch()))
    loss.backward()
    other.backward()
    optimizer.step()
    return [loss, other]


def clipping(model, batch, optimizer, step) -> list:
    losses = plainly(model, batch, optimizer, step)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    return [*losses, norm]


def scaling(model, batch, optimizer, step) -> list:
    scaler = KEPT.setdefault(model, torch.amp.GradScaler("cpu"))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model(batch()))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return [loss]


def inside_autocast(model, batch, optimizer, step) -> list:
    """Also the backward pass, in some steps."""
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model(batch()))
        if step % 2:
            loss.backward()
    if step % 2 == 0:
        loss.backward()
    optimizer.step()
    return [loss]


def evaluating(model, batch, optimizer, step) -> list:
    losses = plainly(model, batch, optimizer, step)
    model.eval()
    with torch.no_grad():
        losses.append(loss_of(model(batch())))
    with torch.inference_mode():
        losses.append(loss_of(model(batch())).clone())
    model.train()
    return losses


def freezing(model, batch, optimizer, step) -> list:
    first, *others = model.parameters()
    first.requires_grad_(step % 3 != 0 or not others)
    return plainly(model, batch, optimizer, step)


def loading(model, batch, optimizer, step) -> list:
    state = {name: value.clone() * 1.01 for name, value in model.state_dict().items()}
    losses = plainly(model, batch, optimizer, step)
    model.load_state_dict(state)
    return losses


def replacing(model, batch, optimizer, step) -> list:
    """Weights that lie elsewhere from some step on."""
    if step == 3:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return plainly(model, batch, optimizer, step)


def twice_differentiated(model, batch, optimizer, step) -> list:
    optimizer.zero_grad()
    x = batch()
    x = x.requires_grad_() if x.is_floating_point() else x
    loss = loss_of(model(x))
    if x.requires_grad and step in (2, 4):
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + gradient.pow(2).sum()
    loss.backward()
    optimizer.step()
    return [loss, x.grad] if x.requires_grad else [loss]


def keeping_results(model, batch, optimizer, step) -> list:
    """What a call returned is still that after other calls, also where it is written to."""
    every = KEPT.setdefault(model, [])
    losses = plainly(model, batch, optimizer, step)
    with torch.no_grad():
        result = model(batch())
    result = result["logits"] if isinstance(result, dict) else result
    every.append(result.add_(1))
    return [*losses, *every]


def changing(model, batch, optimizer, step) -> list:
    """An attribute that Python code reads."""
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.1 * (step // 3)
    return plainly(model, batch, optimizer, step)


LOOPS = [plainly, accumulating, together, kept, clipping, scaling, inside_autocast, evaluating,
         freezing, loading, replacing, twice_differentiated, keeping_results,
         changing]  # fmt: skip


def trained(make, batch, loop, on: bool, steps: int = 6) -> tuple[list, list]:
    """All that some steps leave behind, bit by bit; and what became of the calls."""
    seeded()
    model, counts = make(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    found = []
    config = ON if on else SpeedConfig().alone()
    with apply_speedups(model, config, optimizer=optimizer)[1] as context:
        for step in range(steps):
            found += [one.detach().clone() for one in loop(model, batch, optimizer, step)]
        if on:
            assert context.plan["cuda_graphs"].active
            counts.append(layer_of(model, GraphedCalls).counts)
    found += [torch.zeros(0) if p.grad is None else p.grad for p in model.parameters()]
    found += [*model.state_dict().values(), torch.get_rng_state()]
    found += [v for state in optimizer.state.values() for v in state.values()]
    return found, counts


def assert_same(one: list, other: list) -> None:
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


def assert_close(one: list, other: list) -> None:
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(one, other, strict=True))


# A weight that a call uses twice, and that another call in the same backward pass uses too: the
# gradients are the same, summed in another order. So are gradients of gradients.
SUMS = [("tied weights", together), ("batch and spectral norm", together)]
# What torch refuses: the buffer that a graph keeps was written to by the next call.
REFUSED = [("a counter", together), ("a counter", kept)]


CASES = [one for one in itertools.product(MODELS, LOOPS) if one not in REFUSED]


def assert_alike(name: str, loop, found: list, expected: list) -> None:
    in_another_order = loop is twice_differentiated or (name, loop) in SUMS
    (assert_close if in_another_order else assert_same)(found, expected)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("name", "loop"), CASES, ids=lambda one: getattr(one, "__name__", one))
def test_replays_give_the_same_bits_and_leave_the_same_behind(name, loop):
    make, batch = MODELS[name]
    expected, _ = trained(make, batch, loop, on=False)
    found, (counts,) = trained(make, batch, loop, on=True)
    assert_alike(name, loop, found, expected)
    assert counts.replays > 0
    assert counts.captures >= 1
    assert sum(device.replays for device in OnCpu.made) >= counts.replays


def test_a_parameter_that_no_gradient_comes_for_has_none():
    seeded()
    model, x = Heads(), rows()
    with apply_speedups(model, ON)[1]:
        for _ in range(4):
            model.zero_grad()
            loss_of(model(x)).backward()
        assert model.other.weight.grad is None
        model.zero_grad()
        model(x)["other"].sum().backward()
        assert model.two.weight.grad is None
        assert model.other.weight.grad is not None


def test_the_first_call_is_looked_at_the_second_recorded_and_the_backward_pass_before_the_third():
    model, x = Net(), rows()
    with apply_speedups(model, ON)[1] as context:
        seen = []
        for _ in range(4):
            loss_of(model(x)).backward()
            seen.append(ENTRY.observe(context.target)["model.cuda_graphs"])
    assert seen == [
        "0 captured, 0 replayed, 1 plain",
        "1 captured, 1 replayed, 1 plain",
        "2 captured, 2 replayed, 1 plain",
        "2 captured, 3 replayed, 1 plain",
    ]
    assert ENTRY.observe(context.target) == {"model.cuda_graphs": False}


def test_the_report_has_the_proof():
    from speedkit_jupyter.report.plan_report import context_report

    model, x = Net().eval(), rows()
    with apply_speedups(model, ON)[1] as context, torch.no_grad():
        for _ in range(5):
            model(x)
        text = context_report(context).to_text()
    assert "1 captured, 4 replayed, 1 plain" in text
    assert "1 captured; plain calls: the first of its kind (1)" in text


def test_in_a_benchmark_the_timed_steps_are_replays_and_the_record_says_so():
    seeded()
    model, x = Net(), rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        return loss

    found = benchmark(step, "baseline,cuda_graphs", budget_s=0.3)
    record = found.records[1]
    assert record.accuracy.verdict == "exact"
    assert "captured" in record.notes["cuda_graphs"]
    replays = sum(device.replays for device in OnCpu.made)
    assert replays >= 2 * len(record.times_s) > 2  # one forwards, one back, in each
    assert layer_of(model, GraphedCalls) is None


# What can't be recorded.


class Waiting(Net):
    def forward(self, x):
        return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)


class Masked(Net):
    def forward(self, x):
        return super().forward(x[x[:, 0] > 0])


class InPlace(Net):
    def forward(self, x):
        return super().forward(x.mul_(0.5) if not x.requires_grad else x)


class Noting(Net):
    def forward(self, x):
        self.latest = super().forward(x)
        return self.latest * 1


class Dicing(Net):
    def forward(self, x):
        return super().forward(x) if random.random() < 0.5 else self.two(self.one(x))


class Numpy(Net):
    def forward(self, x):
        return super().forward(x) * float(np.random.rand())


class Reading(Net):
    def forward(self, x):
        return super().forward(x) + STRANGER


class Checkpointed(Net):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Own(Net):
    def forward(self, x):
        return Double.apply(super().forward(x))


class Sharing(Net):
    def forward(self, x):
        y = super().forward(x)
        return y, y[:2]


class Replacing(Counting):
    def forward(self, x):
        self.seen = self.seen + 1
        return Net.forward(self, x)


class Objects(Net):
    def forward(self, x):
        return {"logits": super().forward(x), "what": object()}


class Generator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = [torch.Generator().manual_seed(0)]

    def forward(self, x):
        return super().forward(x) + torch.rand(3, generator=self.generator[0])


class Sparse(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, sparse=True)


class Weights(Net):
    def forward(self, x):
        with torch.no_grad():
            self.one.weight.clamp_(-0.3, 0.3)
        return super().forward(x)


class Other(Net):
    def forward(self, x):
        return super().forward(x) * self.scale[0]

    def __init__(self) -> None:
        super().__init__()
        self.scale = [torch.ones(3, requires_grad=True)]


class Moving(Net):
    """Lays its weights anew where they are others, as an LSTM does on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.known = id(self.one.weight)

    def forward(self, x):
        if id(self.one.weight) != self.known:
            self.one.weight.data = self.one.weight.data.clone()
        return super().forward(x)


class Forces(Net):
    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).sum()
            return super().forward(x) + torch.autograd.grad(energy, x)[0][:, :3]


class Elsewhere(Net):
    """Keeps its weights in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.every = [*self.parameters()]

    def forward(self, x):
        return super().forward(x) * self.every[0].mean()


class Recurrent(nn.Module):
    """Keeps its weights in a list of its own, and makes that anew where they are others."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 3)

    def forward(self, x):
        return self.gru(x)[0]


STRANGER = torch.ones(3)
UNFIT = {
    "waits for a number": (Waiting, rows, "waits for results"),
    "as many rows as a mask says": (Masked, rows, "waits for results"),
    "writes to inputs": (InPlace, rows, "writes to its inputs"),
    "writes to weights": (Weights, rows, "writes to its weights"),
    "notes something": (Noting, rows, "changes what lies on the modules"),
    "another buffer": (Replacing, rows, "changes what lies on the modules"),
    "Python's random numbers": (Dicing, rows, "draws random numbers"),
    "NumPy's": (Numpy, rows, "draws random numbers"),
    "a generator": (Generator, rows, "a random generator of its own"),
    "a global tensor": (Reading, rows, "neither weights nor buffers"),
    "checkpoints": (Checkpointed, rows, "checkpointing"),
    "Python in the backward pass": (Own, rows, "backward pass runs Python code"),
    "a leaf of its own": (Other, rows, "neither weights"),
    "views of one another": (Sharing, rows, "shares memory"),
    "returns an object": (Objects, rows, "among its results"),
    "sparse gradients": (Sparse, ids, "sparse"),
    "moves its weights": (Moving, rows, "moves its weights"),
    "a backward pass inside": (Forces, rows, "a backward pass of its own"),
    "weights in a list": (Elsewhere, rows, "in another place too"),
}


def loss_of_any(result) -> torch.Tensor:
    return loss_of(result[0] if isinstance(result, tuple) else result)


def unfit_loop(model, batch, optimizer, step) -> list:
    optimizer.zero_grad()
    loss = loss_of_any(model(batch()))
    loss.backward()
    if not any(p.grad is not None and p.grad.is_sparse for p in model.parameters()):
        optimizer.step()
    return [loss]


@pytest.mark.parametrize("name", UNFIT)
def test_what_can_not_be_recorded_is_called_as_ever_and_the_note_says_why(name):
    make, batch, why = UNFIT[name]
    found = []
    for on in (False, True):
        seeded()
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        config = ON if on else SpeedConfig().alone()
        with apply_speedups(model, config)[1] as context:
            losses = [unfit_loop(model, batch, optimizer, step)[0].detach() for step in range(5)]
            if on:
                assert why in context.notes["cuda_graphs"]
                counts = layer_of(model, GraphedCalls).counts
                assert counts.plain.total() + counts.replays == 5
                assert counts.replays == 0
        grads = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
        found.append([*losses, *grads, *model.state_dict().values(), torch.get_rng_state()])
        found[-1] += [torch.tensor(random.random()), torch.tensor(np.random.rand())]
    assert_same(*found)


def test_what_is_made_anew_for_other_weights_while_it_is_recorded_is_put_back():
    expected, _ = trained(Recurrent, rows, plainly, on=False)
    found, (counts,) = trained(Recurrent, rows, plainly, on=True)
    assert_same(found, expected)
    assert counts.replays == 5
    model, x = Recurrent(), rows()
    weights = model.gru._flat_weights
    with apply_speedups(model, ON)[1]:
        for _ in range(3):
            loss_of(model(x)).backward()
    assert model.gru._flat_weights is weights
    assert all(map(operator.is_, weights, model.parameters()))


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_a_hook_runs_as_often_as_the_module_also_one_that_comes_later(kind):
    model, x, ran = Net(), rows(), []
    with apply_speedups(model, ON)[1] as context:
        for _ in range(3):
            loss_of(model(x)).backward()
        register = getattr(model.one, f"register_{kind}_hook")
        handle = register(lambda *args: ran.append(1) and None)
        for _ in range(3):
            loss_of(model(x)).backward()
        assert len(ran) == 3
        assert "hook" in context.notes["cuda_graphs"]
        before = layer_of(model, GraphedCalls).counts.replays
        handle.remove()
        loss_of(model(x)).backward()
        assert layer_of(model, GraphedCalls).counts.replays == before + 1


def test_hooks_of_parameters_run_once_a_backward_pass():
    model, x, ran = Net(), rows(), []
    model.one.weight.register_hook(lambda gradient: ran.append("one"))
    model.two.weight.register_post_accumulate_grad_hook(lambda parameter: ran.append("two"))
    with apply_speedups(model, ON)[1] as context:
        for _ in range(4):
            loss_of(model(x)).backward()
        assert "3 replayed" in ENTRY.observe(context.target)["model.cuda_graphs"]
    assert sorted(ran) == ["one"] * 4 + ["two"] * 4


def test_other_shapes_dtypes_and_keywords_are_kinds_of_their_own():
    seeded()
    model, found = Heads(), []
    calls = [
        ((torch.randn(5, 4),), {}), ((torch.randn(3, 4),), {}),
        ((torch.randn(5, 4),), {"scale": 2.0}), ((torch.randn(5, 4), 2.0), {}),
        ((torch.randn(4, 5).t(),), {}), ((torch.randn(1, 4).expand(5, 4),), {}),
        ((torch.randn(5, 4),), {"mask": torch.ones(5, 8)}),
        ((torch.randn(5, 4, requires_grad=True),), {}),
    ]  # fmt: skip
    plain = [model(*args, **kwargs)["logits"].detach() for args, kwargs in calls]
    with apply_speedups(model, ON)[1] as context:
        for _ in range(3):
            found = [model(*args, **kwargs)["logits"].detach() for args, kwargs in calls]
            assert_same(found, plain)
        counts = layer_of(model, GraphedCalls).counts
        assert (counts.captures, counts.replays, counts.plain.total()) == (8, 16, 8)
        model(torch.randn(7, 4)), model(torch.randn(7, 4))
        assert graphed_calls.TOO_MANY in context.notes["cuda_graphs"]


def test_shapes_that_never_come_back_are_no_longer_looked_at(monkeypatch):
    monkeypatch.setattr(graphed_calls, "MOST_SEEN", 3)
    model = Net()
    with apply_speedups(model, ON)[1] as context:
        for rows_in in range(1, 8):
            model(torch.randn(rows_in, 4))
        assert layer_of(model, GraphedCalls).counts.captures == 0
        assert "ever other shapes" in context.notes["cuda_graphs"]


def test_under_autocast_weights_are_cast_in_each_replay():
    found = []
    for on in (False, True):
        seeded()
        model, x = Net().eval(), rows()
        with apply_speedups(model, ON if on else SpeedConfig().alone())[1]:
            results = []
            for _ in range(5):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    results += [model(x).detach(), F.linear(x, model.one.weight).detach()]
                with torch.no_grad():
                    model.one.weight.add_(0.01)
            if on:
                assert layer_of(model, GraphedCalls).counts.replays == 4
        found.append(results)
    assert_same(*found)


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autograd.detect_anomaly(check_nan=False),
        lambda: torch.autograd.graph.save_on_cpu(),
        lambda: FlopCounterMode(display=False),
    ],
    ids=["anomalies", "saved tensors", "operations"],
)
@pytest.mark.filterwarnings("ignore:Anomaly")
def test_where_something_looks_at_each_step_of_a_call_it_is_made_as_ever(around):
    model, x = Net().eval(), rows()
    with apply_speedups(model, ON)[1] as context:
        for _ in range(3):
            loss_of(model(x)).backward()
        replays = layer_of(model, GraphedCalls).counts.replays
        with around():
            loss_of(model(x)).backward()
        assert layer_of(model, GraphedCalls).counts.replays == replays
        assert "looks" in context.notes["cuda_graphs"]


def test_torch_func_goes_through_the_model():
    model, x = Net().eval(), rows()
    with apply_speedups(model, ON)[1]:
        for _ in range(3):
            model(x)
        assert torch.allclose(torch.func.vmap(model)(x), model(x), atol=1e-6)
        jacobian = torch.func.jacrev(model)(x[0])
        assert jacobian.shape == (3, 4)


def test_checkpointing_around_the_model_computes_it_again():
    found = []
    for on in (False, True):
        seeded()
        model = Net()
        with apply_speedups(model, ON if on else SpeedConfig().alone())[1]:
            for reentrant in (False, True, False, True):
                x = rows().requires_grad_()
                loss_of(checkpoint(model, x, use_reentrant=reentrant)).backward()
        found.append([p.grad for p in model.parameters()])
    assert_same(*found)


# Failing, and undoing.


def test_a_recording_that_fails_leaves_all_as_it_was_and_the_call_is_made_as_ever():
    OnCpu.failure = RuntimeError("CUDA error: operation not permitted\nmore lines")
    expected, _ = trained(Normed, rows, plainly, on=False)
    found, (counts,) = trained(Normed, rows, plainly, on=True)
    assert_same(found, expected)
    why = "it can't be recorded: RuntimeError: CUDA error: operation not permitted"
    assert counts.plain[why] == 5
    assert counts.captures == counts.replays == 0


def test_what_was_recorded_before_another_recording_failed_is_recorded_anew():
    model = Net().eval()
    with apply_speedups(model, ON)[1], torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, 4))
        OnCpu.failure = RuntimeError("no")
        for _ in range(2):
            model(torch.ones(3, 4))
        OnCpu.failure = None
        counts = layer_of(model, GraphedCalls).counts
        assert counts.captures == 1
        model(torch.ones(2, 4))
        assert counts.captures == 2


@pytest.mark.parametrize("moment", ["warm-up", "recording"])
def test_an_interrupt_while_it_is_recorded_leaves_model_and_random_numbers_as_they_were(moment):
    class Interrupted(Normed):
        def forward(self, x):
            if CALLS and CALLS.pop():
                raise KeyboardInterrupt
            return super().forward(x)

    seeded()
    model, x = Interrupted(), rows()
    parameters = [*map(id, model.parameters())]
    with apply_speedups(model, ON)[1]:
        loss_of(model(x)).backward()
        before = [t.clone() for t in (*model.state_dict().values(), torch.get_rng_state())]
        CALLS[:] = {"warm-up": [True, False], "recording": [True, *[False] * captured.WARM_UPS]}[
            moment
        ]
        with pytest.raises(KeyboardInterrupt):
            model(x)
        assert_same([*model.state_dict().values(), torch.get_rng_state()], before)
        assert [*map(id, model.parameters())] == parameters
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        loss_of(model(x)).backward()
        assert layer_of(model, GraphedCalls).counts.replays == 1


CALLS: list[bool] = []


def test_the_users_own_error_is_the_users_own():
    model = Net()
    with apply_speedups(model, ON)[1]:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                model(torch.ones(2, 5))
        with pytest.raises(TypeError, match="forward"):
            model(torch.ones(2, 4), what=1)


def test_a_second_backward_pass_through_a_freed_graph_is_torchs_own_error():
    model, x = Net(), rows()
    with apply_speedups(model, ON)[1]:
        for _ in range(4):
            loss = loss_of(model(x))
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()


def attributes(model: nn.Module) -> list:
    return [sorted(part.__dict__) for part in model.modules()]


def test_once_restored_all_that_was_recorded_is_gone():
    model, x = Normed(), rows()
    before = attributes(model), [*map(id, (*model.parameters(), *model.buffers()))]
    context = apply_speedups(model, ON)[1]
    for _ in range(4):
        loss = loss_of(model(x))
        loss.backward()
    (kept_alive,) = [
        weakref.ref(one) for one in layer_of(model, GraphedCalls)._kinds.values()
        if isinstance(one, captured.Captured)
    ]  # fmt: skip
    context.restore()
    assert kept_alive() is None  # at once: memory of a GPU does not wait for the garbage collector
    assert loss.isfinite()
    after = attributes(model), [*map(id, (*model.parameters(), *model.buffers()))]
    assert after == before
    assert model._compiled_call_impl is None


def test_a_backward_pass_may_come_after_the_plan_and_after_the_model():
    found = []
    for on in (False, True):
        seeded()
        model, x = Net(), rows().requires_grad_()
        with apply_speedups(model, ON if on else SpeedConfig().alone())[1]:
            for _ in range(3):
                loss = loss_of(model(x))
                if _ < 2:
                    loss.backward()
        del model
        loss.backward()
        found.append([x.grad])
    assert_same(*found)


def test_a_model_that_is_gone_takes_its_plan_with_it():
    model, x = Net(), rows()
    context = apply_speedups(model, ON)[1]
    for _ in range(3):
        loss_of(model(x)).backward()
    gone = weakref.ref(model)
    del model, context
    gc.collect()
    assert gone() is None


def test_copies_and_files_carry_nothing_of_it():
    model, x = Net(), rows()
    before, keys = attributes(model), list(model.state_dict())
    with apply_speedups(model, ON)[1]:
        for _ in range(3):
            loss_of(model(x)).backward()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert attributes(twin) == before
            assert torch.equal(twin.eval()(x), model.eval()(x))
        assert list(model.state_dict()) == keys


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_plans_on_a_model_and_its_parts_are_taken_back_in_any_order(order):
    part, x = Net(), rows()
    model = nn.Sequential(nn.Linear(4, 4), part)
    other = nn.Sequential(part, nn.Linear(3, 2))
    before = attributes(model), attributes(other)
    plans = [apply_speedups(one, ON)[1] for one in (model, part, other)]
    for _ in range(4):
        for one in (model, part, other):
            loss_of(one(x)).backward()
    for number in order:
        plans[number].restore()
        for one in (model, part, other):
            loss_of(one(x)).backward()
    assert (attributes(model), attributes(other)) == before


def test_what_is_inside_of_a_recorded_call_is_made_as_ever():
    part, x = Net().eval(), rows()
    model = nn.Sequential(nn.Linear(4, 4), part)
    with apply_speedups(model, ON)[1], apply_speedups(part, ON)[1], torch.no_grad():
        plain = part(model[0](x))
        for _ in range(4):
            assert torch.equal(model(x), plain)
        assert layer_of(model, GraphedCalls).counts.replays == 3


def test_several_models_in_one_step_each_have_their_own():
    def run(on):
        seeded()
        one, other = Net(), Normed()
        optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.05)
        config, losses = ON if on else SpeedConfig().alone(), []
        with apply_speedups(one, config)[1], apply_speedups(other, config)[1]:
            for _ in range(5):
                x = rows()
                y = one(x)
                loss = loss_of(other(torch.cat([y, y[:, :1]], 1)))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            if on:
                assert layer_of(one, GraphedCalls).counts.replays == 4
                assert layer_of(other, GraphedCalls).counts.replays == 4
        return [*losses, *one.state_dict().values(), *other.state_dict().values()]

    assert_same(run(False), run(True))


def test_threads_that_call_the_model_at_once_get_their_own_results():
    model = Net().eval()
    inputs = [torch.full((5, 4), float(n)) for n in range(4)]
    with torch.no_grad():
        plain = [model(x) for x in inputs]
    wrong = []

    def calls(x, expected, times=30):
        for _ in range(times):
            with torch.no_grad():
                if not torch.equal(model(x), expected):
                    wrong.append(x)

    with apply_speedups(model, ON)[1]:
        # In a thread too: torch's number of threads is each one's own, and part of the kind.
        first = threading.Thread(target=calls, args=(inputs[0], plain[0], 2))
        first.start()
        first.join()
        threads = [
            threading.Thread(target=calls, args=one) for one in zip(inputs, plain, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = layer_of(model, GraphedCalls).counts
    assert wrong == []
    assert counts.plain == {"the first of its kind": 1}
    assert counts.replays == 121


def test_nothing_is_recorded_while_another_thread_is_in_the_model():
    class Waiting(Net):
        def forward(self, x):
            if len(x) == 7:
                inside.set()
                assert goes_on.wait(10)
            return super().forward(x)

    inside, goes_on = threading.Event(), threading.Event()
    model, x = Waiting().eval(), rows()
    with apply_speedups(model, ON)[1] as context:
        model(x)
        thread = threading.Thread(target=model, args=(torch.ones(7, 4),))
        thread.start()
        assert inside.wait(10)
        model(x)
        assert layer_of(model, GraphedCalls).counts.captures == 0
        assert graphed_calls.BUSY in context.notes["cuda_graphs"]
        goes_on.set()
        thread.join()
        model(x)
        assert layer_of(model, GraphedCalls).counts.captures == 1


def test_measured_in_a_thread_it_acts_there_alone():
    model, x, counts = Net().eval(), rows(), []
    context = prepare(model, ON)

    def other():
        for _ in range(3):
            model(x)
        counts.append(str(layer_of(model, GraphedCalls).counts))

    with context.in_force(), torch.no_grad():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        model(x), model(x)
        counts.append(str(layer_of(model, GraphedCalls).counts))
    assert counts == ["0 captured, 0 replayed, 0 plain", "1 captured, 1 replayed, 1 plain"]


def test_what_was_recorded_is_there_again_after_a_variant_was_switched_off_and_on():
    model, x = Net().eval(), rows()
    context = prepare(model, ON)
    with torch.no_grad():
        for _ in range(3):
            with context.in_force():
                model(x), model(x)
                counts = str(layer_of(model, GraphedCalls).counts)
    assert counts == "1 captured, 5 replayed, 1 plain"


# Deciding, on machines that are elsewhere.


@pytest.mark.parametrize(
    ("machine", "on"),
    [("t4", True), ("h200", True), ("mi300x", True), ("rtx4050_laptop_windows", True),
     ("apple_m2_mps", False), ("arc_b580_xpu", False)],
)  # fmt: skip
def test_it_is_for_gpus_of_nvidia_and_amd(hardware, machine, on):
    kind = {"apple_m2_mps": "mps", "arc_b580_xpu": "xpu:0"}.get(machine, "cuda:0")
    facts = CUDA.moved(kind)
    decision = plan(ON, hardware(machine), facts)["cuda_graphs"]
    assert decision.active is on
    assert decision.declined is not on
    if not on:
        assert f"the model is on {kind}" in decision.reason
    auto = plan(SpeedConfig(compile=False), hardware(machine), facts)["cuda_graphs"]
    assert not auto.active
    assert not auto.declined


def test_on_a_cpu_it_is_declined(hardware, monkeypatch):
    monkeypatch.delitem(capture.KINDS, "cpu")
    decision = plan(ON, hardware("cpu"), Facts())["cuda_graphs"]
    assert decision.declined
    assert "GPUs of NVIDIA's and AMD's" in decision.reason
    assert ENTRY.candidates(hardware("cpu"), Facts(linears=50)) == ()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"compiled": "in place"}, "reduce-overhead"),
        ({"compiled": "wrapper"}, "reduce-overhead"),
        ({"compiled": "script"}, "TorchScript"),
        ({"own_checkpointing": "on"}, "checkpointing"),
        ({"lazy": True}, "lazy"),
        ({"devices": ("cuda:0", "cuda:1")}, "cuda:0 and cuda:1"),
    ],
)
def test_what_is_known_beforehand_declines_it(hardware, more, why):
    from dataclasses import replace

    facts = replace(CUDA, **more)
    decision = plan(ON, hardware("t4"), facts)["cuda_graphs"]
    assert decision.declined
    assert why in decision.reason
    assert ENTRY.candidates(hardware("t4"), facts) == ()


def test_where_the_plan_compiles_that_records_by_itself(hardware):
    found = plan(SpeedConfig(cuda_graphs=True), hardware("a100"), CUDA)
    assert found["compile"].active
    assert found["cuda_graphs"].declined
    assert "compile:reduce-overhead" in found["cuda_graphs"].reason
    found = plan(SpeedConfig(cuda_graphs=True, compile=False), hardware("a100"), CUDA)
    assert found["cuda_graphs"].active


def test_beside_activation_checkpointing_it_is_declined(hardware):
    config = SpeedConfig(cuda_graphs=True, activation_checkpointing=True).alone()
    facts = Facts(device="cuda:0", devices=("cuda:0",), blocks=4, block_classes=("Block",))
    assert "checkpointing" in plan(config, hardware("t4"), facts)["cuda_graphs"].reason


@pytest.mark.parametrize(
    ("layers", "weights", "tried"),
    [(40, 20_000_000, True), (2, 1_000, False), (40, 7_000_000_000, False)],
)
def test_a_search_tries_it_where_there_are_many_small_layers(hardware, layers, weights, tried):
    facts = Facts(device="cuda:0", devices=("cuda:0",), linears=layers, parameters=weights)
    assert ENTRY.candidates(hardware("h200"), facts) == ((True,) if tried else ())
    reason = plan(SpeedConfig(), hardware("h200"), facts)["cuda_graphs"].reason
    assert reason
    if tried:
        alone = plan(SpeedConfig().alone(), hardware("h200"), facts)
        assert not alone["cuda_graphs"].active


def test_a_search_puts_nothing_beside_compile_that_means_nothing_there():
    graphs, compiled = Candidate({"cuda_graphs": True}), Candidate({"compile": True})
    other = Candidate({"precision": "bf16"})
    assert joined(other + graphs, compiled).values == {"precision": "bf16", "compile": True}
    assert joined(other, compiled).values == (other + compiled).values


@pytest.mark.parametrize("form", ["torch", "accelerate", "fabric"])
def test_the_code_says_it_by_torchs_own_function(hardware, form):
    text = code(plan(ON, hardware("t4"), CUDA), form=form)
    assert "torch.cuda.make_graphed_callables(model, samples" in text
    compile(text, "<code>", "exec")


def test_trainer_can_not_do_it(hardware):
    with pytest.raises(SpeedKitError, match="keyword"):
        code(plan(ON, hardware("t4"), CUDA), form="transformers")


def test_the_code_records_the_first_shapes_and_leaves_buffers_and_random_numbers(monkeypatch):
    """A stand-in for torch's function warms up, and puts a forward of its own on the model."""
    sampled = []

    def graphed(model, samples, allow_unused_input):
        assert allow_unused_input
        assert not torch.is_autocast_cache_enabled()
        sampled.append(samples)
        plain = model.forward
        model(*samples)

        def forward(*inputs):
            assert [one.shape for one in inputs] == [one.shape for one in samples]
            return plain(*inputs)

        model.forward = forward

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graphed)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)
    found = []
    for on in (False, True):
        seeded()
        model = Counting()
        if on:
            exec(cuda_graphs.CODE, {"torch": torch, "model": model})
        results = [model(x) for x in (rows(), rows(), torch.randn(3, 4), rows())]
        with torch.no_grad():
            results.append(model(rows()))
        found.append([*results, *model.state_dict().values(), torch.get_rng_state()])
    assert_same(*found)
    assert len(sampled) == 1


# On a GPU.

OF_A_GPU = [(name, loop) for name, loop in CASES if loop not in (scaling, inside_autocast)]


def on_cuda(make, batch):
    return (lambda: make().cuda()), (lambda: batch().cuda())


def cuda_random(found: list) -> list:
    return [*found, torch.cuda.get_rng_state()]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "loop"), OF_A_GPU, ids=lambda one: getattr(one, "__name__", one))
def test_on_a_gpu_replays_give_the_same_bits_and_leave_the_same_behind(name, loop):
    make, batch = on_cuda(*MODELS[name])
    expected = cuda_random(trained(make, batch, loop, on=False)[0])
    found, (counts,) = trained(make, batch, loop, on=True)
    assert_alike(name, loop, cuda_random(found), expected)
    assert counts.replays > 0


@pytest.mark.gpu
def test_on_a_gpu_a_replayed_step_launches_graphs_and_few_kernels():
    from torch.profiler import ProfilerActivity, profile

    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(30))).cuda()
    x, launches = torch.randn(8, 32, device="cuda"), []
    with apply_speedups(model, ON)[1]:
        for _ in range(4):
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
                loss_of(model(x)).backward()
                torch.cuda.synchronize()
            names = [event.name for event in trace.events()]
            launches.append([names.count("cudaGraphLaunch"), names.count("cudaLaunchKernel")])
        assert "3 replayed" in str(layer_of(model, GraphedCalls).counts)
    assert launches[0][0] == 0
    assert launches[-1][0] == 2  # forward and backward
    assert launches[-1][1] < launches[0][1] / 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu_it_trains_under_autocast_and_a_scaler(dtype):
    found = []
    for on in (False, True):
        seeded()
        model, scaler = Normed().cuda(), torch.amp.GradScaler("cuda")
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
        with apply_speedups(model, ON if on else SpeedConfig().alone())[1]:
            for _ in range(6):
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=dtype):
                    loss = loss_of(model(rows().cuda()))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                losses.append(loss.detach())
            if on:
                assert layer_of(model, GraphedCalls).counts.replays == 5
        found.append([*losses, *model.state_dict().values()])
    assert_same(*found)


@pytest.mark.gpu
def test_on_a_gpu_another_threads_work_goes_on_while_it_is_recorded():
    stop, errors, done = threading.Event(), [], []

    def works():
        side = torch.cuda.Stream()
        try:
            with torch.cuda.stream(side):
                while not stop.is_set():
                    pinned = torch.empty(1 << 16).pin_memory()
                    done.append(pinned.to("cuda", non_blocking=True).sum().item())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=works)
    thread.start()
    try:
        for number in range(1, 6):
            model, x = Normed().cuda(), torch.randn(number, 4, device="cuda")
            with apply_speedups(model.eval(), ON)[1]:
                for _ in range(4):
                    loss_of(model(x)).backward()
                counts = layer_of(model, GraphedCalls).counts
            assert (counts.captures, counts.replays) == (2, 3)
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert done


class Synchronizing(Net):
    def forward(self, x):
        if x.is_cuda:
            torch.cuda.synchronize()  # which no operation shows
        return super().forward(x)


@pytest.mark.gpu
def test_on_a_gpu_after_a_recording_that_failed_stream_and_random_numbers_are_as_ever():
    found = []
    for on in (False, True):
        seeded()
        model, stream = Synchronizing().cuda(), torch.cuda.current_stream()
        with apply_speedups(model, ON if on else SpeedConfig().alone())[1] as context:
            results = [model(rows().cuda()).detach() for _ in range(4)]
            if on:
                assert "it can't be recorded" in context.notes["cuda_graphs"]
        assert torch.cuda.current_stream() == stream
        torch.manual_seed(1)
        found.append([*results, torch.rand(3, device="cuda"), torch.cuda.get_rng_state()])
    assert_same(*found)


@pytest.mark.gpu
def test_on_a_gpu_memory_is_free_once_it_is_restored():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).cuda()
    x = torch.randn(4096, 256, device="cuda")
    loss_of(model(x)).backward()
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    context = apply_speedups(model, ON)[1]
    for _ in range(4):
        loss_of(model(x)).backward()
    model.zero_grad()
    assert torch.cuda.memory_reserved() > before
    context.restore()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (32 << 20)  # workspaces of cuBLAS stay
