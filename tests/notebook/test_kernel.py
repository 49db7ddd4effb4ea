"""What only a real kernel shows: the stop button, tracebacks, progress."""

from __future__ import annotations

import re
import time

import pytest

from speedkit_jupyter.rounds.statistics import INTERVAL

pytestmark = [pytest.mark.usefixtures("made_time"), pytest.mark.kernel, pytest.mark.slow]

SETUP = """
%load_ext speedkit_jupyter
import time, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.rand(32, 64), torch.randint(10, (32,))
loss_fn = nn.CrossEntropyLoss()
"""
STEP = "loss = loss_fn(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()"


@pytest.fixture
def ready(kernel):
    assert kernel(SETUP)["status"] == "ok"
    yield kernel
    assert kernel("%unload_ext speedkit_jupyter")["status"] == "ok"


@pytest.mark.smoke
def test_the_stop_button_ends_a_benchmark_with_the_results_so_far(ready):
    ready("before = [p.clone() for p in model.parameters()]")
    ready.start(f"%%speedbench --compare baseline,baseline --budget 60\n{STEP}")
    ready.wait_for(*(f"round {number}," for number in range(12, 1000)))
    ready.interrupt()
    reply = ready.finish()
    assert reply["ename"] == "KeyboardInterrupt"
    assert INTERVAL in reply["text"]
    same = ready("print(all(map(torch.equal, before, model.parameters())), len(optimizer.state))")
    assert same["text"] == "True 0\n"


@pytest.mark.smoke
def test_a_line_that_waits_is_named_by_its_cell_and_line(ready):
    ready("def total(loss):\n    return loss.item()")
    reply = ready(f"%%speedbench --profile --budget 0.5\n{STEP}\ntotal(loss)\nfloat(loss)")
    for line in (2, 4):
        assert re.search(rf"cell \d+, line {line}\b", reply["text"]), reply["text"]


def test_an_interrupt_inside_the_benchmarked_step_puts_everything_back(ready):
    ready.start("%%speedbench --budget 60\nmodel.eval(); model(x); print('in'); time.sleep(30)")
    ready.wait_for("in\n")
    ready.interrupt()
    assert ready.finish()["ename"] == "KeyboardInterrupt"
    assert ready("print(model.training)")["text"] == "True\n"


@pytest.mark.compile
@pytest.mark.parametrize("after_s", [pytest.param(0.3, marks=pytest.mark.thorough), 2.5])
def test_an_interrupted_compile_is_an_interrupt_and_compiles_the_next_time(ready, after_s):
    ready(
        "import torch._dynamo; torch._dynamo.reset(); from torch._inductor.utils import fresh_cache"
    )
    ready("cache = fresh_cache(); cache.__enter__()")
    ready("%speedkit apply model --compile true")
    ready.start("print('compiling', flush=True); out = model(x); print('compiled')")
    ready.wait_for("compiling")
    interrupted = _interrupt_after(ready, after_s)
    assert interrupted["ename"] in ("KeyboardInterrupt", ""), interrupted  # "": it had ended
    again = ready("out = model(x); print(ctx.notes, not model._compiled_call_impl.code.failed)")
    ready("cache.__exit__(None, None, None)")
    assert "{} True\n" in again["text"], again


def _interrupt_after(kernel, seconds):
    time.sleep(seconds)
    kernel.interrupt()
    return kernel.finish()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("cell", "name", "told"),
    [
        ("%speedkit apply modle", "UsageError", "Did you mean 'model'?"),
        ("%%speedbench\nloss = (model(x)", "UsageError", "SyntaxError: "),
        ("import speedkit_jupyter\nspeedkit_jupyter.tune(3)", "StepError", "line 2: `speedkit"),
        ("%%speedbench\nraise ValueError('mine')", "ValueError", "raise ValueError('mine')"),
    ],
)
def test_an_error_stops_run_all_and_shows_none_of_our_insides(ready, cell, name, told):
    reply = ready(cell)
    assert (reply["status"], reply["ename"]) == ("error", name)
    assert told in reply["text"] + reply["traceback"]
    assert "speedkit_jupyter/" not in reply["text"] + reply["traceback"]
