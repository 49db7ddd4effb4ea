"""Magics take the user's own names for models, optimizers, contexts, steps and containers."""

import warnings
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from speedkit_jupyter import apply_speedups, benchmark
from speedkit_jupyter.notebook.commands import commands
from speedkit_jupyter.notebook.completion import complete
from speedkit_jupyter.notebook.panel.panel import Panel
from speedkit_jupyter.notebook.speedbench import parser
from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.support.exceptions import ArgumentError
from speedkit_jupyter.support.wrappers import models_in

HOLDERS = """
class Trainer:
    def __init__(self):
        self.net = nn.Linear(4, 4)
        self.opt = torch.optim.SGD(self.net.parameters(), 0.1)
    @property
    def broken(self):
        raise RuntimeError("mine")
models = {"lm": nn.Linear(3, 3), "vision net": nn.Linear(3, 3), 3: nn.Linear(3, 3)}
layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
trainer = Trainer()
"""


@pytest.mark.parametrize(
    ("word", "expression"),
    [
        ("models['lm']", "models['lm']"), ('models["lm"]', "models['lm']"),
        ("models['vision net']", "models['vision net']"), ("models[3]", "models[3]"),
        ("layers[0]", "layers[0]"), ("layers[-1]", "layers[-1]"), ("trainer.net", "trainer.net"),
        ("model[3]", "model[3]"), ("model.3", "model[3]"), ('"models[\'lm\']"', "models['lm']"),
    ],
)  # fmt: skip
def test_a_model_is_named_as_python_names_it(shell, word, expression):
    shell.run(HOLDERS)
    shown = shell.run(f"%speedkit apply {word} --precision bf16")
    assert shell.names["ctx"].model is eval(expression, shell.names)
    assert f"Applied to {expression}" in shown
    for line in (f"report {word}", f"code {word}", "report", "code", "status"):
        assert expression in shell.run(f"%speedkit {line}")


def test_an_optimizer_is_found_where_its_model_is(shell):
    shell.run("run = type('Run', (), {})()\nrun.net, run.opt = model, optimizer")
    shell.run("del model, optimizer\n%speedkit apply run.net")
    assert shell.names["run"].opt.param_groups[0]["fused"]
    assert "optimizer.step()" in shell.run("%speedkit code run.net --as torchrun")


@pytest.mark.parametrize(
    ("cell", "chosen"),
    [
        ("run.net = nn.Sequential(model)", "run.net"),  # `model` is a part of it
        ("run.net = nn.Linear(2, 2)", "model"),
        ("run.net = model", "model"),
    ],
)
def test_apply_takes_the_model_that_is_listed_first(shell, cell, chosen):
    shell.run(f"run = type('Run', (), {{}})()\n{cell}")
    assert f"`%speedkit apply {chosen}` would do this" in shell.run("%speedkit")
    shell.run("%speedkit apply")
    assert shell.names["ctx"].model is eval(chosen, dict(shell.names))


def test_two_applied_models_have_a_context_each_and_the_second_says_its_name(shell):
    shell.run("second = nn.Linear(2, 2)\n%speedkit apply model")
    first = shell.names["ctx"]
    shown = shell.run("%speedkit apply second --precision bf16")
    assert "this context is `ctx_second`" in shown
    assert shell.names["ctx"] is first
    assert shell.names["ctx_second"].model is shell.names["second"]
    shell.run("%speedkit apply second --precision bf16")
    assert shell.names["ctx_second"].active
    shown = shell.run("%speedkit report")
    assert "`model`" in shown
    assert "`second`" in shown
    assert "which model? model, second" in str(shell.fails("%speedkit code"))


def test_a_variable_of_the_users_stays(shell):
    shell.run("ctx = [1]\n%speedkit apply model")
    assert shell.names["ctx"] == [1]
    assert shell.names["ctx_model"].active


PARSERS = {**commands(), "speedbench": parser()}


@pytest.mark.parametrize("topic", PARSERS)
def test_help_of_one_command_has_each_option_with_a_line(shell, topic):
    lines = [line.split() for line in shell.run(f"%speedkit help {topic}").splitlines()]
    assert lines
    for strings in filter(None, (action.option_strings for action in PARSERS[topic]._actions)):
        assert any(line[:1] == strings[:1] and len(line) > 2 for line in lines), strings


@pytest.mark.parametrize("line", ["help", "--help", "-h", "?"])
def test_help_is_one_page(shell, line):
    shown = shell.run(f"%speedkit {line}")
    assert "%%speedbench --tune" in shown
    assert len(shown.strip().splitlines()) <= 22


@pytest.mark.parametrize("line", ["help tune", "apply -h", "apply ?"])
def test_help_of_a_topic_is_its_options(shell, line):
    assert "--optimizer NAMES" in shell.run(f"%speedkit {line}")
    assert "--tune" in shell.run("%speedbench --help") + shell.run("%%speedbench -h\n1")


def refuses(self, *given):
    raise RuntimeError("settings are not configured")


METHODS = ["getattribute", "eq", "hash", "repr", "len", "bool", "iter", "call", "reduce_ex"]
MEMBERS = {f"__{name}__": refuses for name in METHODS}
STUBBORN = type("Lazy", (), MEMBERS | dict.fromkeys(("__class__", "__dict__"), property(refuses)))

LINES = ("status", "apply model", "apply model --optimizer optimizer", "report", "code model", "")
BENCH = "--compare baseline,fused_optimizer --budget 0.05 -v found --model model"

HELD = {"name": "stranger = one", "attribute": "stranger = types.SimpleNamespace(one=one)",
        "element": "stranger = [one, {'a': one}]"}  # fmt: skip


@pytest.mark.parametrize("place", HELD)
def test_a_stranger_breaks_no_magic(shell, place):
    shell.run("import types\ndef train():\n    model(x).sum().backward(); optimizer.step()")
    shell.names["one"] = STUBBORN.__new__(STUBBORN)
    shell.run(HELD[place])
    for line in LINES:
        shell.run(f"%speedkit {line}")
    shell.run("%speedkit restore")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shown = shell.run(f"%%speedbench {BENCH}\nstranger\ntrain()")
    assert "fused_optimizer" in shown


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
    """Return the shell with a pipeline of two models."""
    shell.run(SETUP)
    return shell


def test_whole_models_are_found_in_order_without_parts_caches_and_wrappers(held):
    assert list(models_in(held.names["pipe"])) == [".unet", ".heads['a']"]
    net = nn.Linear(2, 2)
    several = {"net": net, "wrapped": nn.DataParallel(net), 3: nn.Linear(1, 1)}
    assert list(models_in(several)) == ["['net']", "[3]"]


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
    assert "Restored `pipe.unet`" in held.run("%speedkit restore pipe.unet")
    assert [applied_to(model) for model in models] == [None, contexts[1]]
    held.run("%speedkit apply pipe.unet --precision bf16")
    assert "Restored `pipe.heads['a']`, `pipe.unet`" in held.run("%speedkit restore pipe")
    assert [applied_to(model) for model in models] == [None, None]


@pytest.mark.parametrize("applied", [False, True])
def test_reports_code_reasons_and_panels_say_which_model_is_which(held, applied):
    if applied:
        held.run("%speedkit apply pipe --precision bf16")
    for line in ("report pipe", "code pipe", "explain gemm pipe", "panel pipe"):
        shown = held.run(f"%speedkit {line}")
        assert all(f"`{part}`" in shown for part in PARTS), line


def test_tab_and_a_line_without_a_name_offer_the_object_after_its_models(held):
    words = complete("%speedkit apply ", held.names)
    assert [word for word in words if word in (*PARTS, "pipe")] == [*PARTS, "pipe"]
    held.run("unet, head = pipe.unet, pipe.heads['a']")
    assert "pipe" in complete("%speedkit apply ", held.names)
    held.run("del model, unet, head")
    assert str(held.fails("%speedkit apply")).endswith(f"which model? {', '.join(PARTS)}, pipe")


def test_a_single_model_is_meant_where_one_is_needed(held):
    held.run("alone = {'only': nn.Linear(2, 2)}")
    assert "`alone['only']`" in held.run("%speedkit catalog alone")


def test_python_calls_name_the_models_or_take_them_all_as_comparisons_do(held, made_time):
    pipe, x = held.names["pipe"], held.names["x"]
    for call in (apply_speedups, Panel):
        with pytest.raises(ArgumentError, match=r"Give one of its models: \.unet, \.heads\['a'\]"):
            call(pipe)
    found = benchmark(lambda: pipe(x), "baseline,bf16", model=pipe, budget_s=1)
    held.run("%%speedbench --compare baseline,bf16 --model pipe --budget 1 -v found\npipe(x)")
    assert found.records[1].failure is held.names["found"].records[1].failure is None
    held.run("pair = [nn.Linear(1, 1), nn.Linear(1, 1)]")
    assert "the step does not use these models" in str(held.fails("%speedkit advise pair"))
    assert all(applied_to(model) is None for model in models_in(pipe).values())


def test_a_time_has_a_unit_or_is_in_seconds():
    every = (parser().parse_line(f"--at-most {one}") for one in ("20ms", "1.5min", "3"))
    assert [one.at_most for one in every] == pytest.approx([0.02, 90.0, 3.0])
