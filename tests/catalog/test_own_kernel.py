"""Test that a user's function in the catalog works like every other entry."""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from training import training_step

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, benchmark, code, optimization
from speedkit_jupyter.catalog import CATALOG, find
from speedkit_jupyter.extras.kernels import custom
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.notebook.commands.plans import apply
from speedkit_jupyter.plans.planning import plan
from speedkit_jupyter.search.candidates import candidates
from speedkit_jupyter.search.learning import setting
from speedkit_jupyter.step.variants import variant
from speedkit_jupyter.support.exceptions import ArgumentError, ConfigError

NAME = "my_layernorm"


def by_hand(module: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    """Normalize by hand.

    Tables show only the first line.
    """
    x = x - x.mean(-1, keepdim=True)
    x = x * (x.square().mean(-1, keepdim=True) + module.eps).rsqrt()
    return x * module.weight + module.bias


@pytest.fixture
def added() -> Iterator[Callable[..., Any]]:
    """Yield a function that registers its argument under NAME; remove the entry at the end."""
    yield lambda function=by_hand: optimization(NAME, replaces=nn.LayerNorm)(function)
    custom.forget(NAME)


class Own(nn.LayerNorm):
    """LayerNorm with its own `forward`, which a function for LayerNorm does not replace."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), Own(8), nn.LayerNorm(8))


def looks(model: nn.Module) -> list:
    return [(type(part), sorted(vars(part)), part.training) for part in model.modules()]


X = torch.rand(5, 6, generator=torch.Generator().manual_seed(1))
ON = {NAME: True}


def test_config_words_options_and_reports_have_it_from_then_on(added):
    older = SpeedConfig()
    assert added() is by_hand
    config = SpeedConfig(**ON)
    assert config.to_dict() == SpeedConfig.from_dict(config.to_dict()).to_dict() == ON
    assert (older.to_dict(), older.word(NAME)) == ({}, "auto")
    assert older.changed(NAME, True).to_dict() == ON
    assert variant(f"bf16+{NAME}").config.to_dict() == {"alone": True, "precision": "bf16", **ON}
    assert f"--{NAME}" in apply._option_string_actions
    assert find(NAME).summary == "Normalize by hand"
    with pytest.raises(ConfigError, match=f"{NAME}: 'fast' is not allowed; allowed: auto, true"):
        SpeedConfig(**{NAME: "fast"})


def test_it_stands_in_for_the_modules_of_its_class_and_is_undone_exactly(added):
    calls = []

    def counted(module, x):
        calls.append(module)
        return by_hand(module, x)

    added(counted)
    model = network()
    before, plain = looks(model), model(X)
    plain.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with apply_speedups(model, SpeedConfig(**ON).alone())[1] as context:
        assert context.changes()[0].after == "in 2 of 2 LayerNorm"
        found = model(X)
        found.sum().backward()
    assert calls == [model[1], model[4]]
    torch.testing.assert_close(found, plain)
    found = [p.grad for p in model.parameters()]
    torch.testing.assert_close(found, gradients, atol=1e-4, rtol=1e-4)
    assert looks(model) == before


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.deepcopy, saved_and_loaded])
def test_a_copy_made_while_it_is_applied_has_its_classes_own_forward(added, again):
    added(lambda module, x: torch.zeros_like(x))
    model, x = network(), torch.rand(5, 8)
    expected, part, config = model(X), model[1](x), SpeedConfig(**ON).alone()
    with apply_speedups(model, config)[1]:
        made, shallow = again(model), copy.copy(model[1])
    assert torch.equal(made(X), expected)
    assert torch.equal(shallow(x), part)
    with apply_speedups(made, config)[1]:
        assert not made(X).any()
    assert looks(made) == looks(model)


def test_a_forward_that_the_user_has_set_stays_his(added):
    added()
    model = network()
    model[1].forward = lambda x: x
    with apply_speedups(model, SpeedConfig(**ON).alone())[1] as context:
        assert context.changes()[0].after == "in 1 of 1 LayerNorm"
    assert model[1].forward(3) == 3


def test_two_plans_with_it_are_taken_back_in_any_order(added):
    added()
    model = network()
    before, config = looks(model), SpeedConfig(**ON).alone()
    contexts = [apply_speedups(part, config)[1] for part in (model, model[1])]
    for context in contexts:
        context.restore()
    assert looks(model) == before


def test_rules_leave_it_a_search_tries_it_and_a_model_without_such_modules_declines(added):
    added()
    assert not plan(facts=Facts.read(network()))[NAME].active
    decision = plan(SpeedConfig(**ON), facts=Facts.read(nn.Linear(2, 2)))[NAME]
    assert decision.declined
    assert decision.reason == "the model has no LayerNorm"
    for model, tried in ((network(), True), (nn.Linear(2, 2), False)):
        names = [one.name for one in candidates(Hardware.from_json("cpu"), [Facts.read(model)])]
        assert (NAME in names) == tried


def test_a_cell_that_is_run_again_registers_it_anew_and_plans_in_force_stay(added):
    added()
    model = network()
    plain, entries = model(X), len(CATALOG)
    with apply_speedups(model, SpeedConfig(**ON).alone())[1] as context:
        added(lambda module, x: torch.zeros_like(x))
        assert len(CATALOG) == entries
        torch.testing.assert_close(model(X), plain)
        assert context.plan[NAME].active
    with apply_speedups(model, SpeedConfig(**ON).alone())[1]:
        assert not model(X).any()


def test_a_plan_from_before_it_was_added_is_still_one(added):
    older = plan(facts=Facts.read(network()))
    added()
    assert older.facts_after.device == "cpu"
    assert "def predict" in code(older)


TAKEN = ("bf16", "compile", "model", "auto", "alone", "copy", "request")
NO_NAMES = ("My", "a-b", "", "_x", "class", 3)


@pytest.mark.parametrize(
    ("name", "replaces", "told"),
    [
        *((name, nn.LayerNorm, f"^the name '{name}' is taken: choose another") for name in TAKEN),
        *((name, nn.LayerNorm, "can't name an optimization") for name in NO_NAMES),
        (NAME, nn.LayerNorm(3), "replaces must be a class of modules"),
        (NAME, nn.LayerNorm, "decorate a function"),
    ],
)
def test_what_can_not_be_an_optimization_is_refused_in_a_line(name, replaces, told):
    with pytest.raises(ArgumentError, match=told):
        optimization(name, replaces=replaces)(nn.Identity())


def off_by_two_percent(module, x):
    return by_hand(module, x) * 1.02


@pytest.mark.checked
@pytest.mark.parametrize(
    ("function", "verdicts"),
    [(by_hand, {"faster", "slower", "same", "too noisy"}), (off_by_two_percent, {"wrong"}),
     (lambda module, x: by_hand(module, x).detach(), {"wrong", "failed"})],
)  # fmt: skip
def test_a_benchmark_checks_what_it_computes(added, function, verdicts):
    added(function)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = training_step(optimizer, lambda: model(X).square().mean())
    comparison = benchmark(step, f"baseline,{NAME}", budget_s=0.3)
    assert comparison.verdict(comparison.records[1]) in verdicts


def test_what_was_learned_holds_for_this_very_function_and_for_models_that_have_the_modules(added):
    model, other, machine = network(), nn.Linear(2, 2), Hardware.from_json("cpu")
    marks = [(setting([model], machine), setting([other], machine))]
    for function in (by_hand, off_by_two_percent):
        added(function)
        marks.append((setting([model], machine), setting([other], machine)))
    own, others = zip(*marks, strict=True)
    assert len(set(own)) == 3
    assert len(set(others)) == 1


def test_as_plain_code_it_computes_the_same(added):
    added()
    model = network()
    with apply_speedups(model, SpeedConfig(**ON).alone())[1] as context:
        expected, text = model(X), code(context.plan)
    text = text.replace(f"from {by_hand.__module__} import by_hand", "")
    names: dict[str, Any] = {"model": model, "by_hand": by_hand}
    exec(text, names)
    assert torch.equal(names["predict"](X), expected)
    assert model[1].forward.__func__ is by_hand


def test_it_is_compiled_with_the_model(added):
    added()
    model = network()
    plain = model(X)
    config = SpeedConfig(compile={"enabled": True, "backend": "eager"}, **ON).alone()
    with apply_speedups(model, config)[1]:
        torch.testing.assert_close(model(X), plain)
