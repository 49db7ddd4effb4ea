"""Check behavior that only a real kernel shows, such as the stop button and displays."""

import re
import time

import pytest

from speedkit_jupyter.rounds.statistics import INTERVAL

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

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


@pytest.mark.compile
@pytest.mark.parametrize("after_s", [pytest.param(0.3, marks=pytest.mark.thorough), 2.5])
def test_an_interrupted_compile_is_an_interrupt_and_compiles_the_next_time(ready, after_s):
    ready("import torch._dynamo; torch._dynamo.reset()")
    ready("import torch._inductor.utils as u; cache = u.fresh_cache(); cache.__enter__()")
    ready("%speedkit apply model --compile true")
    ready.start("print('compiling', flush=True); out = model(x); print('compiled')")
    ready.wait_for("compiling")
    time.sleep(after_s)
    ready.interrupt()
    interrupted = ready.finish()

    assert interrupted["ename"] in ("KeyboardInterrupt", ""), interrupted  # "" if it had compiled
    again = ready("out = model(x); print(ctx.notes, not model._compiled_call_impl.code.failed)")
    ready("cache.__exit__(None, None, None)")
    assert "{} True\n" in again["text"], again


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


WIDGETS = """
%load_ext speedkit_jupyter
%matplotlib inline
import ipywidgets, torch, matplotlib.pyplot as plt
import ipywidgets.widgets.widget as registry
from IPython.display import HTML, clear_output, display
from tqdm.auto import tqdm
from torch.utils.data import DataLoader
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.randn(8, 4)
loader = DataLoader(torch.randn(64, 4), batch_size=16)
mine = ipywidgets.IntText(3)

class Shown:
    def __repr__(self):
        return "Shown by the step"

def work():
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def state():
    print(len(registry._instances), mine.comm is not None, plt.get_fignums())
"""
STEPS = {
    "display": "display(Shown()); work()",
    "figures": "plt.plot([1, 2]); plt.show(); display(Shown()); work()",
    "bars": "for _ in tqdm(range(3)): work()",
    "widgets": "s = ipywidgets.IntSlider(); display(s); s.value = 5; work()",
}
COMMANDS = {
    "comparing": "%%speedbench --compare baseline,baseline --budget 1",
    "timing": "%%speedbench --budget 1",
}


@pytest.fixture
def before(kernel) -> str:
    """Return the state of widgets and figures before a step is measured."""
    assert kernel(WIDGETS)["status"] == "ok"
    return kernel("state()")["text"]


def test_only_the_first_call_is_shown_and_no_widget_or_figure_is_left(kernel, before):
    for name, command in COMMANDS.items():
        for kind, step in STEPS.items():
            reply = kernel(f"{command}\n{step}")
            assert reply["status"] == "ok", reply["traceback"]
            assert reply["text"].count("Shown by the step") <= 1, (name, kind)
            assert not {"IntSlider", "FloatProgress"} & set(reply["text"].split("(")), (name, kind)
            assert kernel("state()")["text"] == before, (name, kind)
