"""The user's own names: of models, optimizers, contexts and steps, in every magic; and objects."""

import warnings

import pytest

from speedkit_jupyter.notebook.commands import commands
from speedkit_jupyter.notebook.speedbench import parser

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
        ("run.net = nn.Sequential(model)", "run.net"),  # of which `model` is a part
        ("run.net = nn.Linear(2, 2)", "model"),
        ("run.net = model", "model"),
    ],
)
def test_apply_takes_the_model_that_is_listed_first(shell, cell, chosen):
    shell.run(f"run = type('Run', (), {{}})()\n{cell}")
    listed = shell.run("%speedkit")
    assert f"`%speedkit apply {chosen}` would do this" in listed
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


# --- help ---


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
