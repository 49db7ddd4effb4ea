"""What libraries set for themselves in a step stays and is not named; patches of the user's go."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.measure.subject.step import StateWarning

# In a process of its own: what a step imports first has not been imported yet.
IMPORTING = """
import sys, warnings
import torch
from torch import nn
from speedkit_jupyter.measure.subject.from_function import step_of
model, x = nn.Linear(2, 2), torch.ones(1, 2)
optimizer = torch.optim.AdamW(model.parameters())
def step():
    {code}
    model(x).sum().backward(); optimizer.step(); optimizer.zero_grad()
said = []
measured = step_of(step)
measured.say = said.append
with measured.isolated():
    step()
print(said)
{after}
"""
FIRST = {
    "matplotlib": (
        "import matplotlib; matplotlib.use('agg'); import matplotlib.pyplot as p",
        "from matplotlib import pyplot as p; p.close(p.figure())",
    ),
    "sklearn": (
        "from sklearn.linear_model import LogisticRegression as L; "
        "L().fit([[0.0], [1.0]], [0, 1])",
        "import sklearn.linear_model; sklearn.linear_model.LogisticRegression()",
    ),
    "by a name": (
        "import importlib; importlib.import_module('torch.utils.benchmark')",
        "torch.utils.benchmark.Timer",
    ),
    "a compiled function": (
        "torch.compile(lambda t: t + 1, backend='aot_eager')(x)",
        "torch.compile(lambda t: t + 2, backend='aot_eager')(x)",
    ),
}  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_what_a_step_loads_first_stays_and_is_not_named(name):
    code, after = FIRST[name]
    if name == "sklearn":
        pytest.importorskip("sklearn")
    script = IMPORTING.format(code=code, after=after)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "[]"


class Images(torch.utils.data.Dataset):
    """Some rows."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class Trainer:
    """With a method that writes files, which the step does not call."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def train(self) -> None:
        """One batch of a new loader."""
        for batch in torch.utils.data.DataLoader(Images(), batch_size=4):
            self.model(batch).sum().backward()
            self.optimizer.step()

    def keep(self, path: str) -> None:
        """Nobody calls it."""
        torch.save(self.model.state_dict(), path)


def test_a_benchmark_of_a_trainer_with_a_loader_names_nothing():
    trainer = Trainer()
    with warnings.catch_warnings():
        warnings.simplefilter("error", StateWarning)
        found = benchmark(lambda: trainer.train(), "baseline,threads:1", budget_s=0.05)
    assert found.beyond == ()


def patched(change: Any) -> list[str]:
    """What is said of a step that makes the change."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)

    def step() -> None:
        model(x)
        change()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StateWarning)
        with step_of(step).isolated():
            step()
    return [str(one.message) for one in caught if one.category is StateWarning]


def by_a_name_that_is_computed() -> None:
    setattr(F, "".join(("ge", "lu")), lambda x: x)


def attribute_of_a_class() -> None:
    nn.Linear.mine = 1


def method() -> None:
    nn.Linear.forward = lambda self, x: x


def function() -> None:
    F.relu = torch.relu


def of_numpy() -> None:
    np.mean = len


def in_python() -> None:
    exec("import builtins; builtins.mine = 1; builtins.print = len")


PATCHES = (by_a_name_that_is_computed, attribute_of_a_class, method, function, of_numpy, in_python)


@pytest.mark.parametrize("change", PATCHES, ids=lambda one: one.__name__)
def test_a_librarys_function_that_the_step_replaces_is_its_own_again(change):
    import builtins

    spaces = [vars(F), vars(nn.Linear), vars(np), vars(builtins)]
    before = [dict(one) for one in spaces]
    try:
        assert patched(change) == []
        for space, saved in zip(spaces, before, strict=True):
            assert dict(space) == saved
    finally:
        F.gelu, F.relu, np.mean = (before[i][n] for i, n in ((0, "gelu"), (0, "relu"), (2, "mean")))
        builtins.print = before[3]["print"]


def test_what_a_library_replaces_in_another_is_named():
    space: dict[str, Any] = {"__name__": "json.hidden"}
    exec("def spoil(space, name, value): space[''.join(name)] = value", space)
    found = F.silu
    try:
        said = patched(lambda: space["spoil"](vars(F), ("si", "lu"), len))
    finally:
        F.silu = found
    assert said == ["torch.nn.functional.silu was changed by the step, and could not be put back"]


def test_what_a_cell_sets_while_a_panel_measures_is_the_cells():
    import calendar

    model = nn.Linear(2, 2)
    found = calendar.firstweekday()
    try:
        with step_of(lambda: model(torch.ones(1, 2))).isolated() as visit, visit.paused():
            calendar.setfirstweekday(3)
        assert calendar.firstweekday() == 3
    finally:
        calendar.setfirstweekday(found)


def test_a_handler_that_the_step_sets_for_ctrl_c_is_gone_after_it():
    import signal

    found, model = signal.getsignal(signal.SIGINT), nn.Linear(2, 2)

    def step() -> None:
        model(torch.ones(1, 2))
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    with step_of(step).isolated():
        step()
    assert signal.getsignal(signal.SIGINT) is found
