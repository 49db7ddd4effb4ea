"""micro_batches: the same results and gradients with less memory, and nothing of it left."""

from __future__ import annotations

import copy
import random
import re
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, benchmark, code, plan
from speedkit_jupyter.measure.checks import memory
from speedkit_jupyter.optimizations import named
from speedkit_jupyter.optimizations.properties.calls import layer_of
from speedkit_jupyter.optimizations.splitting.split_calls import SplitCalls
from speedkit_jupyter.plans.applying import prepare

ENTRY = named("micro_batches")


class Block(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, mask)
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Net(nn.Module):
    """Of samples that don't depend on each other; `result` is what it makes of them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.block = Block(dropout=dropout)

    def forward(self, x, **more):
        return self.result(self.last(self.block(self.first(x), **more)))

    def result(self, y):
        return y


def returning(result) -> type[Net]:
    return type("Net", (Net,), {"result": lambda self, y: result(self, y)})


class Words(nn.Module):
    """Token ids and a mask by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block, self.last = nn.Embedding(20, 8), Block(), nn.Linear(8, 20)

    def forward(self, ids, mask=None, positions=None):
        x = self.table(ids)
        x = x if positions is None else x + positions[:, None]
        return self.last(self.block(x, mask[:, None, :].expand(-1, ids.shape[1], -1)))


class Picture(nn.Module):
    def __init__(self, *norm: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), *norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.net(x).flatten(1))


class Recurrent(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 8, batch_first=batch_first)

    def forward(self, x):
        return self.rnn(x)[0]


def asked(on: bool = True, parts: int = 3) -> SpeedConfig:
    return SpeedConfig(micro_batches={"enabled": on, "parts": parts}).alone()


def rows(number: int = 7):
    return (torch.rand(number, 5, 4),), {}


def words():
    mask = torch.ones(7, 5, dtype=torch.bool).tril(3)
    ids = torch.arange(35).view(7, 5) % 20
    return (ids,), {"mask": mask, "positions": torch.rand(7, 8)}


def pictures():
    return (torch.rand(6, 3, 9, 9),), {}


SEPARABLE = {
    "a tensor": (Net, rows),
    "a tuple": (returning(lambda _, y: (y, y.mean(1))), rows),
    "a dictionary": (returning(lambda _, y: {"logits": y, "none": None}), rows),
    "token ids and masks": (Words, words),
    "convolutions": (Picture, pictures),
    "a batch norm in eval mode": (lambda: Picture(nn.BatchNorm2d(8)).eval(), pictures),
    "a norm of each sample": (lambda: Picture(nn.GroupNorm(2, 8)), pictures),
    "an LSTM of batches": (lambda: Recurrent(True), rows),
    "two samples": (Net, lambda: rows(2)),
    "classes": (returning(lambda _, y: (y, y.argmax(-1))), rows),
}


def stored(self, y):
    self.latest = y
    return y


def listed(self, y):
    self.__dict__.setdefault("found", []).append(y)
    return y


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def result(self, y):
        self.seen += 1
        return y


class Listing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def result(self, y):
        self.found.append(y)
        return y


class Writing(Net):
    def forward(self, x, **more):
        return super().forward(x.mul_(0.5))


WHOLE = {
    "a batch norm that trains": (lambda: Picture(nn.BatchNorm2d(8)), pictures, "writes|depend"),
    "statistics of the batch": (
        lambda: Picture(nn.BatchNorm2d(8, track_running_stats=False)).eval(), pictures, "depend"),
    "a loss": (returning(lambda _, y: y.mean()), rows, "one number"),
    "a loss beside": (returning(lambda _, y: (y.mean(), y)), rows, "one number"),
    "another first dimension": (returning(lambda _, y: y.transpose(0, 1)), rows, "first dim"),
    "a list of numbers": (returning(lambda _, y: (y, len(y))), rows, "int"),
    "an LSTM along the first dimension": (lambda: Recurrent(False), rows, "depend"),
    "the mean over the batch taken off": (
        returning(lambda _, y: y - y.mean(0)), rows, "depend"),
    "only in training": (
        returning(lambda net, y: y - y.mean(0) if net.training else y), rows, "depend"),
    "attention over the batch": (
        returning(lambda _, y: y.transpose(0, 1).softmax(1).transpose(0, 1)), rows, "depend"),
    "what it keeps": (returning(stored), rows, "writes to latest"),
    "what it lists": (Listing, rows, "writes to found"),
    "what it counts in a buffer": (Counting, rows, "writes to seen"),
    "noise of its own": (
        returning(lambda _, y: y + 0.1 * torch.randn_like(y)), rows, "draws random numbers"),
    "a coin of python's": (
        returning(lambda _, y: y * random.random()), rows, "draws random numbers"),
    "one sample": (Net, lambda: rows(1), "one sample"),
    "an error for few": (
        returning(lambda _, y: y if len(y) > 5 else y.no_such_thing), rows, "AttributeError"),
}  # fmt: skip


def seeded(make):
    torch.manual_seed(0), random.seed(0)
    return make()


def leaves(result):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if leaf is not None]


def ran(make, given, config, training=True):
    """The result, all gradients (that of the input, too), and how the calls were made."""
    model = seeded(make)
    (first, *others), more = given()
    if first.is_floating_point():
        first.requires_grad_()
    with apply_speedups(model, config)[1]:
        with torch.set_grad_enabled(training):
            result = model(first, *others, **more)
        layer = layer_of(model, SplitCalls)
        counts = None if layer is None else layer.counts
        floats = [
            leaf for leaf in leaves(result) if torch.is_tensor(leaf) and leaf.is_floating_point()
        ]
        if training:
            weights = [torch.randn(leaf.shape, dtype=leaf.dtype) for leaf in floats]
            sum((leaf * w).sum() for leaf, w in zip(floats, weights, strict=True)).backward()
    gradients = [p.grad for p in (*model.parameters(), first) if p.grad is not None]
    return result, gradients, counts, model


def assert_close(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", SEPARABLE)
def test_in_parts_results_and_gradients_are_those_of_the_whole(name, training):
    expected, gradients, _, _ = ran(*SEPARABLE[name], asked(False), training)
    result, found, counts, _ = ran(*SEPARABLE[name], asked(), training)
    assert str(counts) == "1 in parts, 0 whole"
    assert type(result) is type(expected)
    assert_close(leaves(result), leaves(expected))
    assert_close(found, gradients)


@pytest.mark.parametrize("name", WHOLE)
def test_what_parts_would_change_is_made_as_ever_bit_for_bit_and_says_why(name):
    make, given, why = WHOLE[name]
    expected, gradients, _, plain = ran(make, given, asked(False))
    result, found, counts, model = ran(make, given, asked())
    assert str(counts) == "0 in parts, 1 whole"
    assert re.search(why, counts.note)
    for one, other in zip(leaves(result), leaves(expected), strict=True):
        assert torch.equal(one, other) if torch.is_tensor(one) else one == other
    assert all(map(torch.equal, found, gradients))
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert len(getattr(model, "found", [])) == len(getattr(plain, "found", []))
    assert sorted(vars(model)) == sorted(vars(plain))


def test_what_is_written_to_an_argument_is_written_once():
    x = torch.rand(6, 5, 4)
    before, model = x.clone(), seeded(Writing)
    with apply_speedups(model, asked())[1], torch.no_grad():
        model(x)
    assert torch.equal(x, before * 0.5)


def test_random_generators_are_as_a_call_without_dropout_leaves_them():
    model, states = seeded(Net), []
    for config in (asked(False), asked()):
        torch.manual_seed(1)
        with apply_speedups(model, config)[1]:
            model(rows()[0][0]).sum().backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_dropout_keeps_nothing_from_being_split_and_masks_are_the_same_in_both_passes():
    model = seeded(lambda: Net(dropout=0.5))
    x = torch.rand(8, 5, 4, requires_grad=True)
    with apply_speedups(model, asked(parts=2))[1] as context:
        assert context.plan["micro_batches"].active
        result = model(x)
        # What a sample's mask lets through is what its gradient comes back by.
        (gradient,) = torch.autograd.grad(result.pow(2).sum(), x)
        assert str(layer_of(model, SplitCalls).counts) == "1 in parts, 0 whole"
    torch.manual_seed(3)
    with apply_speedups(model, asked(parts=2))[1]:
        one = model(x)
        torch.manual_seed(3)
        assert torch.equal(one, model(x))
    assert gradient.isfinite().all()


def test_it_needs_less_memory_the_more_parts_there_are():
    peaks, x = [], torch.rand(64, 32, 4)
    for config in (asked(False), asked(parts=2), asked(parts=8)):
        model = nn.Sequential(nn.Linear(4, 8), *(Block() for _ in range(6)), nn.Linear(8, 2))

        def step(model=model):
            model(x).pow(2).mean().backward()

        with apply_speedups(model, config)[1]:
            step()
            peaks.append(memory.needed(step, torch.device("cpu"), []).peak_bytes)
    plain, two, eight = peaks
    assert two < 0.7 * plain
    assert eight < 0.35 * plain


def test_under_autocast_the_same_dtype_and_within_its_rounding():
    found = []
    for on in (False, True):
        model = seeded(Net)
        with apply_speedups(model, asked(on))[1], torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(model(rows()[0][0]))
            if on:
                assert str(layer_of(model, SplitCalls).counts) == "1 in parts, 0 whole"
    assert found[0].dtype == found[1].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_hooks_of_the_users_are_called_once_a_step_with_the_whole_batch(kind):
    model, sizes = seeded(Net), []
    hook = {"forward": "register_forward_hook", "pre": "register_forward_pre_hook"}[kind]
    with apply_speedups(model, asked())[1]:
        getattr(model.block, hook)(lambda _, given, *rest: sizes.append(len(given[0])))
        model(*rows()[0]).sum().backward()
        assert "hook" in layer_of(model, SplitCalls).counts.note
    assert sizes == [7]


def test_under_torch_func_and_while_it_is_traced_calls_are_whole():
    model, x = seeded(Net), rows()[0][0]
    weights = dict(model.named_parameters())

    def loss(weights):
        return torch.func.functional_call(model, weights, (x,)).sum()

    expected = torch.func.grad(loss)(weights)
    with apply_speedups(model, asked())[1]:
        got = torch.func.grad(loss)(weights)
        mapped = torch.vmap(model, randomness="same")(x[:, None])
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    torch.testing.assert_close(mapped[:, 0], model(x))
    images, (pictures_,) = seeded(Picture), pictures()[0]
    with apply_speedups(images, asked())[1]:
        traced = torch.fx.symbolic_trace(images)
        script = torch.jit.trace(images, pictures_, check_trace=False)
        assert str(layer_of(images, SplitCalls).counts) == "0 in parts, 1 whole"
    assert torch.equal(traced(pictures_), images(pictures_))
    assert torch.equal(script(pictures_), images(pictures_))


def test_each_kind_of_calls_is_tried_for_itself():
    class Two(Net):
        def forward(self, x, whole=False):
            y = super().forward(x)
            return y.mean() if whole else y

    model = seeded(Two)
    with apply_speedups(model, asked())[1]:
        x = rows()[0][0]
        model(x), model(x, whole=True), model(x[:5]), model(x, True)
        model.eval()(x)
        counts = layer_of(model, SplitCalls).counts
    assert str(counts) == "3 in parts, 2 whole"


def attributes(model):
    return [sorted(part.__dict__) for part in model.modules()]


@pytest.mark.parametrize("ending", [None, ValueError, KeyboardInterrupt])
def test_nothing_is_left_after_the_plan_after_errors_and_after_an_interrupt(ending):
    class Failing(Net):
        def result(self, y):
            if ending:
                raise ending
            return y

    model = seeded(Failing)
    before = attributes(model), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    ends = pytest.raises(ending) if ending else nullcontext()
    with ends, apply_speedups(model, asked())[1], torch.no_grad():
        model(torch.full((6, 5, 4), 0.5))
    assert attributes(model) == before[0]
    assert all(part.training for part in model.modules())
    assert all(map(torch.equal, model.state_dict().values(), before[1].values()))
    assert torch.equal(torch.get_rng_state(), before[2])


def test_a_measured_plan_acts_in_its_own_thread_alone():
    model, x = seeded(Net), rows()[0][0]
    context = prepare(model, asked())
    with context.in_force():
        layer = layer_of(model, SplitCalls)
        thread = threading.Thread(target=lambda: model(x))
        thread.start()
        thread.join()
        assert str(layer.counts) == "0 in parts, 0 whole"
        model(x)
    assert str(layer.counts) == "1 in parts, 0 whole"


def test_auto_never_takes_it():
    decision = plan(SpeedConfig(), facts=Facts.read(Net()))["micro_batches"]
    assert (decision.active, decision.declined) == (False, False)
    assert "request" in decision.reason


@pytest.mark.parametrize(
    ("facts", "words"),
    [(Facts(compiled="in place"), "compiled"), (Facts(own_checkpointing="on"), "checkpointing")],
)
def test_it_is_declined_with_the_reason(facts, words):
    decision = plan(asked(), facts=facts)["micro_batches"]
    assert (decision.value, decision.active, decision.declined) == (False, False, True)
    assert words in decision.reason


def test_beside_checkpointing_it_is_declined_and_beside_it_nothing_is_compiled(hardware):
    facts = Facts(blocks=4, block_classes=("Block",))
    both = SpeedConfig(activation_checkpointing=True, micro_batches=True)
    assert plan(both, hardware("cpu"), facts)["micro_batches"].declined
    compiled = plan(SpeedConfig(micro_batches=True, compile=True), hardware("t4"), facts)
    assert "micro_batches" in compiled["compile"].reason


def test_only_a_search_for_memory_tries_it_and_not_where_batch_norms_train(hardware):
    from speedkit_jupyter.tuning.candidates import candidates

    def names(facts, aim):
        found = candidates(hardware("cpu"), facts, objective=aim)
        return [one.name for one in found if ENTRY.name in one.values]

    assert names(Facts(), "time") == []
    assert names(Facts(), "memory") == ["micro_batches:4", "micro_batches"]
    assert names(Facts(batch_norms=2), "memory") == []
    assert names(Facts(batch_norms=2, training=False), "memory") == [
        "micro_batches:4", "micro_batches"]  # fmt: skip


@pytest.mark.parametrize("form", ["torch", "accelerate", "fabric"])
def test_the_code_taken_home_does_the_same(form):
    model = seeded(Words)
    (ids,), more = words()
    expected = model(ids, **more)
    text = code(plan(asked(), facts=Facts.read(model)), form, model=model)
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("whole_forward ="))
    end = lines.index("model.forward = in_parts")
    imports = [
        one
        for one in lines
        if one.startswith(("import torch", "from torch.utils", "from functools"))
    ]
    exec("\n".join([*imports, *lines[start : end + 1]]), {"model": model})
    torch.testing.assert_close(model(ids, **more), expected)
    model(ids, **more).sum().backward()


def test_trainer_is_told_its_own_way():
    with pytest.raises(Exception, match="gradient_accumulation_steps=3"):
        code(plan(asked(), facts=Facts.read(Net())), "transformers")


@pytest.mark.slow
def test_a_comparison_shows_less_memory_the_same_numbers_and_how_calls_were_made():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), *(Block() for _ in range(4))), torch.rand(64, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    found = benchmark(
        step, "baseline,micro_batches:4", model=model, optimizer=optimizer, budget_s=20
    )
    record = next(one for one in found.records if one.name == "micro_batches:4")
    assert record.accuracy.verdict in ("exact", "rounding")
    assert record.memory.peak_bytes < 0.6 * found.baseline.memory.peak_bytes
    assert "in parts" in str(found)


class Centred(nn.Module):
    is_on = False

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8, track_running_stats=False) if norm else nn.Identity()

    def forward(self, x):
        found = self.norm(self.layer(x))
        return found - found.mean(0) if self.is_on else found


class Capacity(nn.Module):
    """Drops what is over a capacity, as experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x):
        most = max(4, len(x) // 4)
        found = self.layer(x)
        return torch.cat([found[:most], found[most:] * 0])


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]


def _after_zeros(model):
    model(torch.zeros(8, 4))


def _switched(model):
    model(torch.randn(8, 4))
    model.is_on = True


@pytest.mark.parametrize(("make", "before"), [
    (lambda: Centred(norm=True), _after_zeros),
    (Centred, _switched),
    (Capacity, lambda model: None),
], ids=["first a batch of zeros", "a switch set later", "an expert's capacity"])  # fmt: skip
def test_what_a_trial_has_not_shown_is_not_taken_for_shown(make, before):
    torch.manual_seed(0)
    model, x = make(), torch.randn(8, 4)
    config = SpeedConfig(micro_batches={"enabled": True, "parts": 4}).alone()
    with apply_speedups(model, config)[1]:
        before(model)
        found = model(x)
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)


def test_parts_that_are_padded_each_for_itself_are_called_whole_and_counted():
    model, x = Packed(), torch.randn(8, 6, 4)
    context = apply_speedups(model, SpeedConfig(micro_batches=True).alone())[1]
    with context:
        model(x, torch.full((8,), 6))
        found = model(x, torch.tensor([6, 3, 2, 4, 1, 2, 3, 1]))
        assert "joined" in context.notes["micro_batches"]
    assert found.shape == (8, 6, 5)
