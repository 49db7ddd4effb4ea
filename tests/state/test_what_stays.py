"""What outlives a measurement: nothing of the model's, and the names that compiled code uses."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.state.handlers.names import Names
from speedkit_jupyter.step.step import Step

pytestmark = pytest.mark.usefixtures("made_time")


@pytest.fixture
def no_collector():
    """Off, so that only counting references frees anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def training(fails: bool = False) -> tuple[Any, weakref.ref[Any], weakref.ref[Any]]:
    """A step and weak references to its model and a parameter."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(4, 8)

    def step() -> None:
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if fails:
            raise ValueError("mine")

    return step, weakref.ref(model), weakref.ref(model[0].weight)


@pytest.mark.parametrize("fails", [False, True])
def test_a_benchmark_frees_its_models(no_collector, fails):
    training()[0]()  # torch's own modules are loaded at the first step
    step, model, weight = training(fails)
    with contextlib.suppress(ValueError):
        benchmark(step, "baseline,fused_optimizer,channels_last", budget_s=0.05)
    del step
    assert (model(), weight()) == (None, None)


SOURCE = """
def work(t):
    global n
    n += 1
    t = t + 1
    seen.append(t.sum().item())  # a graph break
    return t * 2
"""


def test_code_that_a_step_compiles_runs_after_a_turn_and_after_the_end(
    request: pytest.FixtureRequest,
) -> None:
    request.addfinalizer(torch._dynamo.reset)
    torch._dynamo.reset()
    space: dict[str, Any] = {"torch": torch, "n": 0, "seen": [], "__name__": "__main__"}
    exec(SOURCE, space)
    compiled = torch.compile(space["work"], backend="eager")
    space |= {"compiled": compiled, "x": torch.ones(3)}
    code = compile("made = compiled(x)", "cell", "exec")
    step = Step(
        lambda context: exec(code, space),
        [torch.nn.Linear(2, 2)],
        names=space,
        assigned=["made"],
        others=[Names(space, code.co_names)],
    )
    with step.guarded() as visit:
        exec(code, space)
        with visit.paused():
            assert "made" not in space
            assert (space["n"], space["seen"]) == (0, [])
        exec(code, space)
    assert "made" not in space
    assert (space["n"], space["seen"]) == (0, [])
    assert compiled(space["x"]).tolist() == [4.0] * 3
