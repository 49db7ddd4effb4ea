"""Test plans with `compile`: another process compiles during the loop, if that saves time."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from speedkit_jupyter.catalog.model_changes import background_compile
from speedkit_jupyter.extras.auto import compiling
from speedkit_jupyter.extras.auto.steps import Kinds, Remaining
from speedkit_jupyter.machines.hardware import cxx_compiler
from speedkit_jupyter.search import learning

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not cxx_compiler(), reason="a C++ compiler")]
FAILS = "raise SystemExit('no memory is left')"
WAITS = "import time; time.sleep(600)"


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()


@pytest.fixture
def at_once(running, monkeypatch):
    """Compile from step 1 on: set the expected cost to 0 and lift the limit of overhead."""
    running._options = (1.0, *running._options[1:])
    for name in ("TRACING_S", "SLOWED", "LOADING"):
        monkeypatch.setattr(compiling, name, 0.0)
    monkeypatch.setattr(compiling, "COMPILE_AFTER_STEPS", 1)


def settled(loop, running, until):
    """Train until `until()` is true of the latest raced loop; return that loop."""
    _, _, train = loop
    for _ in range(100):
        train(20)
        if until(running.latest):
            return running.latest
    raise AssertionError(running.latest.race.reasons)


def test_a_compilation_that_fails_declines_the_plan_in_a_line(loop, running, at_once, monkeypatch):
    monkeypatch.setattr(background_compile, "PROGRAM", FAILS)
    work = settled(loop, running, lambda work: "compile" in str(work.race.reasons))
    assert work.plans.is_applied
    assert "compile" not in work.race.leader
    assert running.lines[-1].endswith("since compiling ended early: no memory is left")


def test_the_winner_serves_while_another_process_compiles(loop, running, at_once, monkeypatch):
    monkeypatch.setattr(background_compile, "PROGRAM", WAITS)
    work = settled(loop, running, lambda work: work._compile.is_running)
    loop[2](5)
    assert work.plans.is_applied
    processes = [one._process for one in work._compile._compilers]
    running.end()
    assert all(one.poll() is not None for one in processes)


def test_a_winner_that_compiled_in_an_earlier_run_is_compiled_at_once(loop, running, monkeypatch):
    monkeypatch.setattr(background_compile, "PROGRAM", WAITS)
    monkeypatch.setattr(compiling, "expected_s", lambda facts, mode: 0.0)
    values = {"fused_optimizer": True, "compile": True}
    known = SimpleNamespace(value={"values": values, "speedup": 3.0, "low": 2.0, "high": 4.0})
    monkeypatch.setattr(learning, "find", lambda where, task: known)
    monkeypatch.setattr(Remaining, "seconds", lambda self, elapsed_s: 600.0)
    loop[2](12)
    work = running.latest
    assert work._compile.is_running
    assert work._compile.name == "fused_optimizer+compile"
    loop[2](300)
    assert work.race.leader == "bf16+fused_optimizer"


def test_code_that_is_ready_is_used_even_if_the_wait_cost_more_than_expected():
    compiling_now = compiling.BackgroundCompile(SimpleNamespace(facts=[], can_compile=False), None)
    compiling_now.is_running = True
    assert compiling_now.outcome(may_go_on=False) == ""


def test_a_short_cell_never_compiles(loop, running):
    work = settled(loop, running, lambda work: work.race.is_settled)
    loop[2](100)
    assert not work._compile.name


def test_batches_of_many_shapes_have_no_usual_one():
    kinds = Kinds()
    shapes = [kinds.of((torch.zeros(4, 1 + number % 2 * number),), {}) for number in range(20)]
    assert kinds.usual == shapes[0]
    for number in range(40):
        kinds.of((torch.zeros(4, 50 + number),), {})
    assert kinds.usual is None


class Chain(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layer, self.drop = nn.Linear(64, 64), nn.Dropout(dropout)

    def forward(self, x):
        y = self.layer(x)
        for _ in range(6):
            y = (y * 1.01 + 0.1).sin() * y.cos() + y.tanh()
        return self.drop(y)


def train_until(running, dropout, until):
    """Train a new model until `until()` is true of its loop; return that loop and the last step."""
    net = Chain(dropout)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for number in range(20000):
        optimizer.zero_grad()
        net(torch.rand(512 if number % 20 else 64, 64)).square().mean().backward()
        optimizer.step()
        if number > 3 and until(running.latest):
            return running.latest, number
    raise AssertionError(running.latest.race.reasons)


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dropout", "word"), [(0.0, "compile"), (0.5, "compile:same_random")])
def test_compiled_code_races_and_begins_the_next_run(running, at_once, monkeypatch, dropout, word):
    known = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    work, _ = train_until(
        running, dropout, lambda work: work.race.is_settled and word in str(work.race.tried)
    )
    assert not any("not compiled" in why for why in work.race.reasons.values())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == known + 2  # traced twice
    values = work.plans.candidates[word].values
    found = SimpleNamespace(value={"values": values, "speedup": 3.0, "low": 2.0, "high": 4.0})
    monkeypatch.setattr(learning, "find", lambda where, task: found)
    monkeypatch.setattr(background_compile, "PROGRAM", FAILS)  # the cache has the code
    running.end()
    running.begin()
    running.begin_cell()
    work, steps = train_until(running, dropout, lambda work: work.plans.in_force == word)
    assert steps < 10
    assert work.race.is_settled


def test_what_remains_is_told_by_loaders_bars_or_the_time_so_far(made_time, monkeypatch):
    remaining = Remaining()
    assert remaining.seconds(7.0) == 7.0
    with remaining.watching():
        batches = iter(DataLoader(range(100), batch_size=1))
    for _ in range(10):
        made_time.sleep(1.0)
        next(batches)
    assert remaining.seconds(7.0) == pytest.approx(90.0, rel=0.05)
    bar = SimpleNamespace(total=50, n=1, format_dict={"elapsed": 10.0})
    tqdm = SimpleNamespace(_instances=[bar])
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=tqdm))
    assert remaining.seconds(7.0) == pytest.approx(490.0)
