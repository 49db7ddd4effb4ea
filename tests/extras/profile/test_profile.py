"""Profile steps whose parts take known times, and check that no instruments are left."""

import signal
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, default_collate
from training import everything

from speedkit_jupyter import StateWarning, advise, benchmark, profile
from speedkit_jupyter.extras.profile import instruments, profiler
from speedkit_jupyter.extras.profile.instruments import installed
from speedkit_jupyter.extras.profile.profile import PARTS
from speedkit_jupyter.extras.profile.profiler import TURNS, Profiler
from speedkit_jupyter.step.step import step_of
from speedkit_jupyter.torchglue.interrupts import interruptible_in_users_code


class Slow(nn.Module):
    def __init__(self, sleep: Callable[[float], None], forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.sleep, self.forward_s, self.backward_s = sleep, forward_s, backward_s
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sleep(self.forward_s)
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: self.sleep(self.backward_s))
        return y


Sleep = Callable[[float], None]


def loader_of(sleep: Sleep, seconds: float) -> DataLoader:
    def collate(rows: list[Any]) -> Any:
        sleep(seconds)
        return default_collate(rows)

    rows = [(torch.full((4,), float(number)), number % 2) for number in range(8)]
    return DataLoader(rows, batch_size=2, collate_fn=collate)


def slow_sgd(net: nn.Module, sleep: Sleep, seconds: float) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: sleep(seconds))
    return optimizer


LOOP_PARTS = ("data", "forward", "backward", "optimizer", "rest")
LOOPS = {  # seconds of each part of a step
    "loader-bound": (0.8, 0.05, 0.1, 0.02, 0.01),
    "compute-bound": (0.01, 0.3, 0.6, 0.1, 0.01),
    "Python-bound": (0.02, 0.05, 0.1, 0.03, 0.9),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_split_as_it_was_made(made_time, name):
    data_s, forward_s, backward_s, optimizer_s, rest_s = LOOPS[name]
    sleep = made_time.sleep
    net = Slow(sleep, forward_s, backward_s)
    optimizer, loader = slow_sgd(net, sleep, optimizer_s), loader_of(sleep, data_s)

    def epoch() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            sleep(rest_s)

    found = profile(epoch, budget_s=60)
    assert found.steps == 4
    whole_s = sum(LOOPS[name])
    assert found.step_s == pytest.approx(whole_s, rel=0.03)
    assert sum(found.seconds(part) for part in PARTS) == pytest.approx(found.step_s)
    for part, seconds in zip(LOOP_PARTS, LOOPS[name], strict=True):
        assert found.share(part) == pytest.approx(seconds / whole_s, abs=0.02), part
    assert max(zip(LOOPS[name], LOOP_PARTS, strict=True))[1] in repr(found).splitlines()[0]


def test_data_that_a_step_draws_from_an_iterator_counts_in_every_call(made_time):
    net = Slow(made_time.sleep, 0.1, 0.1)
    batches = iter(loader_of(made_time.sleep, 0.2))

    def step() -> None:
        x, y = next(batches)
        functional.cross_entropy(net(x), y).backward()

    assert profile(step, budget_s=1.5).share("data") > 0.4
    assert len(list(batches)) == 4


def plain_functions(sleep: Sleep) -> Callable[[], None]:
    weight = torch.ones(4, 2, requires_grad=True)

    class Slept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            sleep(0.5)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            sleep(0.25)
            return gradient * 2

    return lambda: Slept.apply(torch.ones(3, 4) @ weight).sum().backward()


def metrics(sleep: Sleep) -> Callable[[], object]:
    net = Slow(sleep, 0.1, 0.1)
    return lambda: (net(torch.ones(3, 4)).sum().backward(), sleep(0.4))


def recomputed(sleep: Sleep) -> Callable[[], None]:
    net = Slow(sleep, 0.3, 0.1)
    return lambda: checkpoint(net, torch.ones(3, 4), use_reentrant=False).sum().backward()


def closure(sleep: Sleep) -> Callable[[], None]:
    net = Slow(sleep, 0.2, 0.3)
    optimizer = slow_sgd(net, sleep, 0.5)

    def closed() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(3, 4)).sum()
        loss.backward()
        return loss

    return lambda: optimizer.step(closed)


def scaled(sleep: Sleep) -> Callable[[], None]:
    net = Slow(sleep, 0.1, 0.1)
    optimizer = slow_sgd(net, sleep, 0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def step() -> None:
        scaler.scale(net(torch.ones(3, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize(
    ("made", "shares"),
    [
        (plain_functions, {"backward": 1 / 3}),
        (metrics, {"rest": 0.4 / 0.6}),
        (recomputed, {"forward": 0.3 / 0.7, "backward": 0.4 / 0.7}),
        (closure, {"optimizer": 0.5, "forward": 0.2, "backward": 0.3}),
        (scaled, {"optimizer": 0.5}),
    ],
)
def test_what_happens_within_or_outside_of_modules_has_its_part(made_time, made, shares):
    found = profile(made(made_time.sleep), budget_s=20)
    assert {part: found.share(part) for part in shares} == pytest.approx(shares, abs=0.02)
    assert found.steps == 1


class OwnSgd(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def test_with_several_optimizers_a_step_is_a_round_of_all():
    nets = nn.Linear(4, 2), nn.Linear(4, 2)
    first, second = (OwnSgd(net.parameters(), 0.1) for net in nets)
    torch.optim.lr_scheduler.StepLR(first, 10)  # it wraps the optimizer's step

    def step() -> None:
        for _ in range(2):
            for _ in range(5):
                nets[0](torch.ones(3, 4)).sum().backward()
                first.step()
            nets[1](torch.ones(3, 4)).sum().backward()
            second.step()

    assert profile(step, budget_s=0.05).steps == 2


def test_lines_that_wait_are_named_with_their_source_and_how_often():
    net = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(net.parameters())
    losses = []

    def step() -> None:
        loss = net(torch.ones(3, 4)).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for _ in range(3):
            float(loss)
        if loss < 1e9:
            print(f"{loss:.2f}", end="")

    found = profile(step, budget_s=1)
    rows = found.to_dict()["synchronizations"]
    once = ("losses.append(loss.item())", "if loss < 1e9:", 'print(f"{loss:.2f}", end="")')
    assert {row["source"]: row["times"] for row in rows} == {
        **dict.fromkeys(once, 1),
        "float(loss)": 3,
    }
    assert all("test_profile.py, line" in row["place"] for row in rows)
    waited_s = sum(row["seconds"] for row in rows)
    assert waited_s == pytest.approx(found.seconds("synchronizations"))
    assert "On a CPU these lines wait for nothing" in repr(found.report().to_text())
    assert losses == []


def patched_names() -> list[Any]:
    """Return the attributes of the classes and modules that profiling patches."""
    owners = (nn.Module, torch.autograd, DataLoader, torch.optim.Optimizer, torch.Tensor)
    return [dict(vars(owner)) for owner in owners]


@pytest.mark.parametrize(("error", "after"), [(None, 0), (ValueError, 0), (KeyboardInterrupt, 1)])
def test_everything_is_put_back_whatever_the_step_raises(error, after):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    before, calls = (everything(net, optimizer), patched_names()), []

    def step() -> None:
        calls.append(0)
        net(torch.rand(3, 4)).sum().backward()
        optimizer.step()
        if error is not None and len(calls) > after:
            raise error("mine")

    if error is None:
        profile(step, budget_s=0.5)
    else:
        with pytest.raises(error, match="mine"):
            profile(step, budget_s=0.5)
    assert (everything(net, optimizer), patched_names()) == before
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.real_time
@pytest.mark.parametrize("measured", [profile, advise, benchmark])
def test_a_schedule_that_ends_is_measured_from_where_it_is(measured):
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)

    def step() -> None:
        for _ in range(5):
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            schedule.step()

    if measured is benchmark:
        benchmark(step, "baseline,fused_optimizer", budget_s=0.5)
    else:
        with pytest.warns(StateWarning, match="raises ValueError: Tried to step 7 .*starts from"):
            measured(step, budget_s=0.5)
    assert schedule.last_epoch == 0
    step()


def test_torch_s_tables_of_its_functions_hold_none_of_ours():
    net, item = nn.Linear(2, 1), torch.Tensor.item

    def step() -> None:
        net(torch.ones(3, 2)).sum().backward()
        torch.overrides.is_tensor_method_or_property(item)

    torch.overrides._get_tensor_methods.cache_clear()
    profile(step, model=net, budget_s=0.05)
    assert torch.overrides.resolve_name(item) == "torch.Tensor.item"


def test_another_thread_s_training_is_no_part_of_it():
    ours, theirs = nn.Linear(4, 2), nn.Linear(4, 2)
    stop, started = threading.Event(), threading.Event()

    def train() -> None:
        while not stop.is_set():
            theirs(torch.ones(3, 4)).sum().backward()
            theirs.weight.sum().item()
            started.set()

    thread = threading.Thread(target=train)
    thread.start()
    started.wait(10)
    try:
        found = profile(lambda: ours(torch.ones(3, 4)), model=ours, budget_s=0.5)
    finally:
        stop.set()
        thread.join()
    assert found.share("backward") == 0
    assert found.waits() == []


def test_classes_of_torch_are_changed_a_few_times_only(monkeypatch):
    """After a thousand changes to a class, Python 3.13 stops caching its methods for good."""
    changes = []

    @contextmanager
    def counted(recorder, within=True):
        changes.append(recorder)
        with installed(recorder, within):
            yield

    monkeypatch.setattr(instruments, "installed", counted)
    monkeypatch.setattr(profiler, "ENOUGH_CALLS", 5 * TURNS)
    model = nn.Linear(2, 1)
    found = profile(lambda: model(torch.ones(3, 2)).sum().backward(), model=model, budget_s=20)
    assert len(found.splits) >= 5 * TURNS
    assert len(changes) <= 2 * TURNS + 10


@pytest.mark.slow
@pytest.mark.real_time
def test_compiling_is_told_apart_and_the_calls_after_it_do_none():
    torch._dynamo.reset()
    net = torch.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))

    def step() -> None:
        net(torch.ones(3, 4)).sum().backward()

    found = profile(step, model=net, budget_s=2)
    assert found.first.seconds["compiling"] > 0.5 * found.first.total_s
    assert found.share("compiling") == 0
    assert found.share("forward") > 0
    assert "the first call compiled for" in repr(found.report().to_text())


@pytest.mark.real_time
def test_what_is_known_until_ctrl_c_is_kept():
    net = nn.Linear(4, 2)
    run_of = Profiler(step_of(lambda: net(torch.ones(3, 4)).sum().backward(), net), 60, "")

    @interruptible_in_users_code
    def run() -> None:
        for _ in run_of.run():
            if run_of.result().splits:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert run_of.result().share("forward") > 0
    assert "Interrupted" in run_of.result().report().to_text()
