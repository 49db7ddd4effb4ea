"""Messages about torch.compile after a cell name the line and the remedy; training goes on."""

import re
import sys
import warnings

import pytest
import torch

from speedkit_jupyter.extras.compile_record.plugin import session_record

pytestmark = pytest.mark.compile

SETUP = """
import torch
from torch import nn
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        return torch.tanh(self.layer(x))

def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def moved(model, batches=(torch.ones(2, 4),)):
    before = [p.clone() for p in model.parameters()]
    train(model, batches)
    return not any(map(torch.equal, before, model.parameters()))
"""
PLAN = "%speedkit apply model --compile true --compile-backend eager --compile-dynamic false"


@pytest.fixture
def cells(loaded_shell, monkeypatch):
    """Yield a shell with a class of networks, nothing compiled, and an empty compile record."""
    torch._dynamo.reset()
    monkeypatch.setitem(sys.modules, "__main__", loaded_shell.ip.user_module)  # as in a kernel
    monkeypatch.setenv("COLUMNS", "500")
    session_record.cache_clear()
    session_record().news()
    session_record().frames = session_record().graphs = 0
    session_record().findings.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the same problems
        loaded_shell.run(SETUP)
        yield loaded_shell
    torch._dynamo.reset()


BREAKING = """class Breaking(Net):
    def forward(self, x):
        y = super().forward(x)
        if y.sum().item() > 1e6:
            y = y + 1
        return y
model = Breaking()"""


def test_a_graph_break_is_named_once_with_its_line_and_what_to_change(cells):
    cells.run(BREAKING)
    cells.run(PLAN)
    shown = cells.run("print(moved(model))")
    assert "True" in shown
    assert "torch.compile: 1 graph break" in shown
    assert "line 4: `if y.sum().item() > 1e6:`" in shown
    assert "move `.item()` behind the compiled call" in shown
    assert "graph break" not in cells.run("print(moved(model))")


def test_a_storm_of_recompilations_and_the_fall_back_at_its_end_are_named(cells):
    cells.run("model = Net()")
    cells.run(PLAN)
    shown = cells.run("print(moved(model, [torch.ones(size, 4) for size in range(2, 14)]))")
    assert "True" in shown
    assert "7 recompiles, 1 fall-back" in shown
    assert re.search(r"input 1 had size \d in dimension 0, then \d", shown)
    assert "drop_last=True" in shown
    assert "it runs as plain PyTorch from here on" in shown


def test_the_users_own_compiling_is_seen_too(cells):
    cells.run("import time\ndef double(x, scale):\n    return x * scale")
    cells.run('fast = torch.compile(double, backend="eager", dynamic=False)')
    shown = cells.run("fast(torch.ones(3), 2); fast(torch.ones(3), 3)")
    assert "torch.compile: 1 recompile" in shown
    assert "line 3: `return x * scale`" in shown
    assert "the Python value `scale` changed" in shown
    assert "2 frames, 2 graphs" in cells.run("%speedkit compile")


def test_nothing_is_said_where_nothing_is_wrong(cells):
    cells.run("model = Net()")
    cells.run(PLAN)
    assert cells.run("y = model(torch.ones(2, 4)); y.sum().backward()").strip() == ""
    assert cells.run("with torch.no_grad():\n    y = model(torch.ones(2, 4))").strip() == ""
    assert "no graph breaks, recompiles or fall-backs to act on" in cells.run("%speedkit compile")


PART = """@torch.library.custom_op("speedkit_tests::no_shape", mutates_args=())
def no_shape(x: torch.Tensor) -> torch.Tensor:
    return x + 1
no_shape.register_autograd(lambda ctx, grad: grad)
class Odd(nn.Module):
    def forward(self, x):
        return no_shape(x)
model = nn.Sequential(Net(), Odd(), Net())"""


def test_a_model_that_cannot_be_compiled_is_told_the_line_and_the_remedy(cells):
    cells.run(PART)
    cells.run(PLAN)
    with pytest.warns(UserWarning, match=r"runs as before \(.*line 7: with @torch") as told:
        assert "True" in cells.run("print(moved(model))")
    assert "Please use `no_shape.register_fake`" in str(told[0].message)
    with warnings.catch_warnings(record=True) as told:
        assert "True" in cells.run("print(moved(model))")
    assert not [one for one in told if "compile" in str(one.message)]
    assert "the rest is compiled" in cells.run("print(ctx.plan['compile'].reason)")


@pytest.mark.slow
def test_without_a_working_compiler_training_goes_on_and_says_so_once(cells):
    from torch._inductor import config

    broken = config.patch({"cpp.cxx": ("/nowhere/g++",), "force_disable_caches": True})
    cells.run("model = Net()")
    cells.run("%speedkit apply model --compile true")
    with broken, pytest.warns(UserWarning, match="No working C\\+\\+ compiler") as told:
        assert "True" in cells.run("print(moved(model))")
    assert len([one for one in told if "torch.compile failed" in str(one.message)]) == 1
    assert "the model runs as before" in cells.run("print(ctx.plan['compile'].reason)")
