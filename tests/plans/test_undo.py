"""Plans restored in any order, or interrupted, leave everything as docs/contract.md promises."""

import copy
import gc
import pickle  # noqa: TID251
import signal
import sys
import threading
import weakref
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from training import surface

from speedkit_jupyter import Hardware, SpeedConfig, apply_speedups, restore_all
from speedkit_jupyter.catalog.fused_optimizer import FusedOptimizer
from speedkit_jupyter.machines import flags
from speedkit_jupyter.plans import applying, context
from speedkit_jupyter.plans.applying import applied_to, prepare
from speedkit_jupyter.torchglue import interrupts


def convolutions() -> nn.Module:
    first = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(4, 6, 1), nn.Flatten())


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    return model


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0][:, -1]


MODELS = {
    "convolutions": (convolutions, (3, 2, 5, 5)),
    "tied": (tied, (4, 6)),
    "lstm": (lambda: Recurrent(6, 5, batch_first=True), (2, 3, 6)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 4, 8)),
}
# With a small eps, Adam would make full-size steps from gradients that are only rounding errors.
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
        "sdpa": st.sampled_from(["math", "flash"]), "threads": st.sampled_from([1, 2]),
        "channels_last": st.booleans(), "fused_optimizer": st.booleans(),
        "grad_scaler": st.booleans(), "malloc": st.booleans(),
    },
)  # fmt: skip
SAME = {"threads": st.just(1), **dict.fromkeys(("channels_last", "fused_optimizer"), st.booleans())}
EXACT = st.fixed_dictionaries({"precision": st.just("fp32")}, optional=SAME)


def build(model: str, optimizer: str) -> tuple[nn.Module, Any, torch.Tensor]:
    """Return a model with an optimizer and a batch, always from the same seed."""
    torch.manual_seed(0)
    make, shape = MODELS[model]
    network = make()
    return network, OPTIMIZERS[optimizer](network.parameters()), torch.rand(shape)


def train(network: nn.Module, optimizer: Any, x: torch.Tensor, context: Any = None) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with context.autocast() if context else nullcontext():
            value = network(x).float().pow(2).mean()
        value.backward()
        return value

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


# A move applies a plan to the model or a part of it, trains a step, or restores a plan.
MOVES = st.lists(
    st.tuples(CONFIGS, st.booleans(), st.booleans()) | st.just("train") | st.integers(0, 9),
    min_size=1,
    max_size=8,
)


@examples(20)
@given(
    model=st.sampled_from(sorted(MODELS)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    moves=MOVES,
    order=st.randoms(use_true_random=False),
)
def test_plans_restored_in_any_order_leave_everything_as_found(model, optimizer, moves, order):
    network, its_optimizer, x = build(model, optimizer)
    train(network, its_optimizer, x)
    before = surface(network, its_optimizer)
    contexts = []
    for move in moves:
        if move == "train":
            if optimizer != "LBFGS":  # torch's LBFGS fails on gradients in another layout
                train(network, its_optimizer, x)
        elif isinstance(move, tuple):
            config, on_a_part, handed_over = move
            target = next(network.children(), network) if on_a_part else network
            given_optimizer = its_optimizer if handed_over else None
            config = SpeedConfig(**config)
            same, context = apply_speedups(target, config, optimizer=given_optimizer)
            assert same is target
            contexts.append(context)
        elif contexts:
            contexts.pop(move % len(contexts)).restore()
    values = [t.detach().clone() for t in (*network.parameters(), *network.buffers())]
    drawn = torch.get_rng_state().tolist()
    order.shuffle(contexts)
    for context in contexts:
        context.restore()
    assert surface(network, its_optimizer) == before
    assert torch.get_rng_state().tolist() == drawn
    assert all(map(torch.equal, values, (*network.parameters(), *network.buffers())))


@examples(10)
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
    for parameter, twin in zip(network.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(parameter, twin, rtol=1e-4, atol=1e-5)
        state, other = its_optimizer.state.get(parameter, {}), plain_optimizer.state.get(twin, {})
        strides = [v.stride() for v in state.values() if isinstance(v, torch.Tensor)]
        assert strides == [v.stride() for v in other.values() if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("when", ["apply", "restore"])
@pytest.mark.parametrize("fail", [lambda: 1 / 0, lambda: signal.raise_signal(signal.SIGINT)])
def test_half_way_through_apply_or_restore_nothing_is_left_half_done(monkeypatch, when, fail):
    network, optimizer, _ = build("convolutions", "AdamW")
    before = surface(network, optimizer)
    real = FusedOptimizer.applied

    @contextmanager
    def failing(self, decision, target):
        with real(self, decision, target):
            if when == "apply":
                fail()
            yield
        if when == "restore":
            fail()

    monkeypatch.setattr(FusedOptimizer, "applied", failing)
    config = SpeedConfig(threads=1, sdpa="math", channels_last=True)
    with pytest.raises((KeyboardInterrupt, ZeroDivisionError)):
        apply_speedups(network, config, optimizer=optimizer)[1].restore()
    assert surface(network, optimizer) == before


ALL = {"threads": 1, "tf32": "medium", "channels_last": True, "sdpa": "math", "precision": "bf16"}
CONTIGUOUS = (18, 9, 3, 1)


def network() -> nn.Module:
    return build("convolutions", "AdamW")[0]


def test_a_plan_acts_on_its_own_model_in_its_own_thread():
    model, other, dtypes, x = network(), network(), [], torch.ones(2, 2, 5, 5)
    _, context = apply_speedups(model, SpeedConfig(**ALL))
    with context, context.autocast():
        thread = threading.Thread(target=lambda: dtypes.append(other(x).dtype))
        thread.start()
        thread.join()
        dtypes.append(model(x).dtype)
    assert dtypes == [torch.float32, torch.bfloat16]


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_an_applied_model_has_nothing_of_ours(how):
    model = network()
    keys = [sorted(part.__dict__) for part in model.modules()]
    with apply_speedups(model, SpeedConfig(**ALL, compile=True))[1]:
        twin = COPIES[how](model)
        assert applied_to(twin) is None
        assert b"speedkit" not in pickle.dumps(model)
    assert [sorted(part.__dict__) for part in twin.modules()] == keys
    assert [sorted(part.__dict__) for part in model.modules()] == keys


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_that_is_dropped_is_freed_at_once_and_its_flags_come_back(compiled):
    import torch._dynamo

    before = dict(flags.snapshot())
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    weight = model[0].weight
    compiling = {"enabled": compiled, "backend": "aot_eager"}
    apply_speedups(model, SpeedConfig(**ALL, compile=compiling), optimizer=optimizer)
    model(torch.ones(2, 2, 5, 5))
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        if compiled:  # the compiled call in the model's __dict__ makes a cycle
            gc.collect()
        assert gone() is None
    finally:
        gc.enable()
    assert flags.snapshot() == before
    assert weight.stride() == CONTIGUOUS
    assert optimizer.param_groups[0]["fused"] is None


OURS = {one.__file__ for one in (applying, context, interrupts)}
CONFIG = SpeedConfig(sdpa="math", channels_last=True).alone()


class Interrupt:
    """Trace function that sends Ctrl-C at trace event number `at` in the files `OURS`."""

    def __init__(self, at: int) -> None:
        self.at, self.events = at, 0

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename not in OURS:
            return None
        self.events += 1
        if self.events == self.at:
            signal.raise_signal(signal.SIGINT)
        return self


@interrupts.interruptible_in_users_code
def measure(model):
    with prepare(model, CONFIG).in_force():
        pass


WORKS = {
    "apply": lambda model: apply_speedups(model, CONFIG),
    "apply and restore": lambda model: apply_speedups(model, CONFIG)[1].restore(),
    "measure": measure,
}


def run(work, model, sender) -> bool:
    """Run `work` with `sender` as trace function; return whether Ctrl-C ended `work`."""
    try:
        sys.settrace(sender)
        work(model)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("every", [37, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_wherever_it_comes_a_plan_is_whole_and_can_be_taken_back(monkeypatch, work, every):
    found, model = Hardware.detect(), nn.Conv2d(2, 2, 2)
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda cls: found))

    def state():
        return model.weight.stride(), torch.backends.cuda.flash_sdp_enabled()

    before, counted = state(), Interrupt(0)

    run(work, model, counted)
    assert counted.events > 100
    restore_all()
    for at in range(1, counted.events + 1, every):
        run(work, model, Interrupt(at))
        in_force = applied_to(model) is not None
        assert (state() == before) is not in_force, at
        restore_all()
        assert state() == before, at


def test_an_interrupt_while_it_is_applied_leaves_the_plan_of_before_in_force(monkeypatch):
    model = nn.Conv2d(2, 2, 2)
    _, first = apply_speedups(model, CONFIG)

    def observed(target):
        signal.raise_signal(signal.SIGINT)
        return {}

    monkeypatch.setattr(context, "observed", observed)
    with pytest.raises(KeyboardInterrupt):
        apply_speedups(model, SpeedConfig(threads=1).alone())
    monkeypatch.undo()
    assert applied_to(model) is first
    assert first.active
    first.restore()
