"""Objects that hold models are named as they are: each of their models gets a plan of its own."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from speedkit_jupyter import apply_speedups, benchmark
from speedkit_jupyter.notebook.completion import complete
from speedkit_jupyter.notebook.panel.panel import Panel
from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.support.exceptions import ArgumentError
from speedkit_jupyter.support.wrappers import models_in

SETUP = """
class Pipeline:
    def __init__(self):
        self.unet = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Flatten(), nn.Linear(36, 2))
        self.first = self.unet[0]
        self.heads = {"a": nn.Linear(2, 2)}
        self.activation = nn.ReLU()
        self._cache = nn.Linear(2, 2)
    def __call__(self, x):
        return self.heads["a"](self.unet(x))
pipe = Pipeline()
"""
PARTS = ["pipe.unet", "pipe.heads['a']"]


@pytest.fixture
def held(shell):
    """The shell with a pipeline of two models."""
    shell.run(SETUP)
    return shell


def test_whole_models_are_found_in_order_without_parts_caches_and_wrappers(held):
    assert list(models_in(held.names["pipe"])) == [".unet", ".heads['a']"]
    net = nn.Linear(2, 2)
    assert list(models_in({"net": net, "wrapped": nn.DataParallel(net), 3: nn.Linear(1, 1)})) == [
        "['net']",
        "[3]",
    ]


def test_fields_of_slots_and_of_named_tuples_and_a_property_count():
    @dataclass(slots=True)
    class Pair:
        one: nn.Module
        two: list[nn.Module]

    class Trainer:
        model = property(lambda self: net)

    class NotReady:
        model = property(lambda self: 1 / 0)

    net = nn.Linear(2, 2)
    assert list(models_in(Pair(net, [nn.Linear(3, 3)]))) == [".one", ".two[0]"]
    assert list(models_in(namedtuple("Both", "a b")(net, nn.ReLU()))) == [".a"]
    assert list(models_in(Trainer())) == [".model"]
    assert models_in(NotReady()) == models_in(torch.zeros(1)) == models_in(None) == {}


def test_apply_plans_each_model_and_restore_undoes_all(held):
    shown = held.run("%speedkit apply pipe --precision bf16")
    assert all(f"Applied to {part}" in shown for part in PARTS)
    models = list(models_in(held.names["pipe"]).values())
    contexts = [applied_to(model) for model in models]
    assert [context.facts.convolutions for context in contexts] == [1, 0]
    assert "Restored `pipe.unet`, `pipe.heads['a']`" in held.run("%speedkit restore")
    assert [applied_to(model) for model in models] == [None, None]


@pytest.mark.parametrize("applied", [False, True])
def test_report_code_and_explain_say_which_model_is_which(held, applied):
    if applied:
        held.run("%speedkit apply pipe --precision bf16")
    for line in ("report pipe", "code pipe", "explain gemm pipe"):
        shown = held.run(f"%speedkit {line}")
        assert all(f"`{part}`" in shown for part in PARTS), line


def test_a_line_without_a_name_offers_the_object_too(held):
    held.run("del model")
    assert str(held.fails("%speedkit apply")).endswith(f"which model? {', '.join(PARTS)}, pipe")


def test_a_panel_is_shown_for_each_model(held):
    shown = held.run("%speedkit panel pipe")
    assert all(f"`{part}`" in shown for part in PARTS)


def test_a_comparison_takes_the_object_by_its_name(held, made_time):
    held.run("%%speedbench --compare baseline,bf16 --model pipe --budget 1 -v found\npipe(x)")
    assert held.names["found"].records[1].failure is None
    assert all(applied_to(model) is None for model in models_in(held.names["pipe"]).values())


def test_tab_offers_the_object_after_its_models(held):
    words = complete("%speedkit apply ", held.names)
    assert [word for word in words if word in (*PARTS, "pipe")] == [*PARTS, "pipe"]


def test_a_single_model_is_meant_where_one_is_needed(held):
    held.run("alone = {'only': nn.Linear(2, 2)}")
    assert "`alone['only']`" in held.run("%speedkit catalog alone")


def test_python_calls_name_the_models_or_take_them_all(held, made_time):
    pipe, x = held.names["pipe"], held.names["x"]
    for call in (apply_speedups, Panel):
        with pytest.raises(ArgumentError, match=r"Give one of its models: \.unet, \.heads\['a'\]"):
            call(pipe)
    found = benchmark(lambda: pipe(x), "baseline,bf16", model=pipe, budget_s=1)
    assert found.records[1].failure is None
