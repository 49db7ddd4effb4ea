"""Test `compile` with `scope: blocks`. The backend `eager` shares and guards code like Inductor."""

import copy
import itertools
from dataclasses import replace
from inspect import signature

import pytest
import torch
from torch import nn
from training import graphs_of

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, code, plan
from speedkit_jupyter.catalog.compile import Compile, expected_s, whole_model_s
from speedkit_jupyter.catalog.facts.model import repeated_blocks
from speedkit_jupyter.torchglue.modules import COMPILED_CALL as NAME

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("nothing_compiled")]
BLOCKS = {"enabled": True, "scope": "blocks", "backend": "eager"}


class Block(nn.Module):
    """Residual layer with a number; if `breaks` is set, it has a graph break."""

    def __init__(self, number=0.0):
        super().__init__()
        self.number, self.breaks = number, False
        self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        if self.breaks:
            torch._dynamo.graph_break()
        return x + torch.relu(self.layer(self.norm(x)))


class Numbered(Block):
    """Block that computes with its number, so that each one differs."""

    def forward(self, x):
        return super().forward(x) * (1 + self.number)


class Model(nn.Module):
    def __init__(self, make=Block, number=4):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.layers = nn.ModuleList([make() for _ in range(number)])

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MAKES = {
    "the user's": Block,
    "torch's": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "sequences": lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU()),
}
X = torch.ones(2, 3)
# In newer torch, each call of torch.compile has its own recompile limit.
HAS_LIMITS = "recompile_limit" in signature(torch.compile).parameters


def applied(model, **values):
    values = {"compile": BLOCKS, **values}
    return apply_speedups(model, SpeedConfig(**values).alone())[1]


def entries(model) -> dict:
    """Return the names of all attributes of each module."""
    return {name: dict.fromkeys(part.__dict__) for name, part in model.named_modules()}


def calls(model) -> list[str]:
    return [name for name, part in model.named_modules() if part.__dict__.get(NAME) is not None]


@pytest.mark.parametrize("kind", MAKES)
def test_alike_blocks_are_compiled_once_in_place_and_compute_the_same(kind):
    model = Model(MAKES[kind])
    keys, before, plain = list(model.state_dict()), entries(model), model(X)
    with applied(model) as context:
        assert calls(model) == [f"layers.{i}" for i in range(4)]
        assert graphs_of(lambda: model(X)) == 1
        assert torch.allclose(model(X), plain, atol=1e-6)
        model(X).sum().backward()
        assert graphs_of(lambda: model(X)) == 0
        assert list(model.state_dict()) == keys
        assert not context.notes
    assert entries(model) == before
    assert torch.equal(model(X), plain)


@pytest.mark.skipif(not HAS_LIMITS, reason="this torch has one limit for all, which stays")
@pytest.mark.slow
def test_blocks_that_differ_get_a_graph_each_beyond_torchs_limit():
    numbers = itertools.count()
    model = Model(lambda: Numbered(next(numbers)), 12)
    plain = model(X)
    with applied(model) as context:
        assert graphs_of(lambda: model(X)) == 12
        assert torch.allclose(model(X), plain, rtol=1e-5)
        assert graphs_of(lambda: model(X)) == 0
        assert not context.notes


def test_the_reason_and_the_report_say_how_many():
    model = Model()
    with applied(model) as context:
        assert "its 4 repeated blocks" in context.plan["compile"].reason
        assert {c.name: c.after for c in context.changes()}["model.compiled"] == "4 of its modules"
        asked = context.plan.to_config().to_dict()["compile"]
        assert (asked["scope"], asked["backend"]) == ("blocks", "eager")
    assert context.changes() == ()


def test_blocks_that_the_user_has_compiled_stay_so():
    model = Model()
    model.layers[1].compile(backend="eager")
    own = model.layers[1].__dict__[NAME]
    with applied(model) as context:
        assert calls(model) == [f"layers.{i}" for i in range(4)]
        assert model.layers[1].__dict__[NAME] is own
        assert "its 3 repeated blocks" in context.plan["compile"].reason
    assert calls(model) == ["layers.1"]
    assert model.layers[1].__dict__[NAME] is own
    for layer in model.layers:
        layer.compile(backend="eager")
    with applied(model) as context:
        assert context.plan["compile"].declined
    assert len(calls(model)) == 4


def test_a_plan_for_the_whole_model_compiles_through_the_plan_of_a_part():
    model = Model()
    with (
        applied(model.layers[0], compile={"enabled": True, "backend": "eager"}),
        applied(model, compile={"enabled": True, "backend": "eager", "fullgraph": True}) as context,
    ):
        assert graphs_of(lambda: model(X)) == 1
        assert not context.notes
    assert calls(model) == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", ["torch", "transformers"])
@pytest.mark.parametrize("kind", MAKES)
def test_its_code_compiles_the_same_blocks_in_place(form, kind):
    model = Model(MAKES[kind])
    found = plan(SpeedConfig(compile=BLOCKS).alone(), facts=Facts.read(model))
    text = code(found, form, model=model)
    lines = text[text.index("for name in (") :].split("\n\n")[0]
    keys, plain = list(model.state_dict()), model(X)
    exec(lines, {"model": model, "torch": torch})
    # Versions without such limits may compile each block, if its class is torch's own.
    assert 1 <= graphs_of(lambda: model(X)) <= (1 if HAS_LIMITS or kind == "the user's" else 4)
    assert torch.allclose(model(X), plain, atol=1e-6)
    assert list(model.state_dict()) == keys
    assert 'backend="eager"' in lines
    assert ("later copies call" in text.replace("\n# ", " ")) == (kind != "the user's")


def test_on_a_cpu_the_blocks_are_the_scope_where_a_model_is_little_else_than_large_ones(hardware):
    def decided(facts, machine="cpu", **more):
        config = SpeedConfig(compile={"enabled": True, **more}).alone()
        return plan(config, hardware(machine), facts)["compile"]

    def scope(*given, **more):
        return decided(*given, **more).details["scope"]

    facts = replace(Facts.read(Model(number=6)), parameters=3_000_000, block_parameters=2_700_000)
    small = Facts.read(Model(number=24))
    assert scope(facts) == "blocks"
    assert scope(facts, scope="model") == "model"
    assert scope(facts, mode="max-autotune") == scope(facts, fullgraph=True) == "auto"
    assert scope(replace(facts, device="cuda:0"), "a100") == "auto"
    assert scope(replace(facts, blocks=5, block_names=facts.block_names[:5])) == "auto"
    assert scope(replace(facts, block_kinds=2)) == "auto"
    assert scope(replace(facts, parameters=10 * facts.block_parameters)) == "auto"
    assert scope(small) == "auto"
    assert "its 6 repeated blocks (450,000 parameters each)" in decided(facts).reason
    assert whole_model_s(facts) > expected_s(facts, Compile.default)
    for other in (small, replace(facts, device="cuda:0"), replace(facts, processes=2)):
        assert whole_model_s(other) == 0


def test_a_plan_says_what_compiling_is_expected_to_take():
    few, many = (Facts(linears=n, parameters=100, training=True) for n in (4, 40))
    config = SpeedConfig(compile=True).alone()
    hints = [plan(config, facts=one)["compile"].hint for one in (few, many)]
    costs = [expected_s(one, Compile.default) for one in (few, many)]
    assert hints[0] == "compiles at the first step, for about 7 s"
    assert 0 < costs[0] < costs[1]
    assert expected_s(replace(few, training=False), Compile.default) < costs[0]


class Residual(nn.Module):
    def __init__(self, width=4, inner=8):
        super().__init__()
        self.first, self.second = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


class Decoding(nn.Module):
    """Block with two attention modules of one class, which don't count as repeated blocks."""

    def __init__(self):
        super().__init__()
        self.own, self.cross = nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([Residual(4, 32) for _ in range(4)])
        self.router = nn.Linear(4, 4)


class Convolving(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3), nn.Conv2d(outputs, outputs, 3)


def stages():
    """Return a residual network: a sequence of stages, each a sequence of units."""
    return nn.Sequential(*[
        nn.Sequential(Convolving(a, b), *[Convolving(b, b) for _ in range(number - 1)])
        for a, b, number in ((4, 8, 3), (8, 16, 2), (16, 32, 3))
    ])  # fmt: skip


def names(model):
    ids = {id(block) for block in repeated_blocks(model)}
    return [name for name, module in model.named_modules() if id(module) in ids]


def numbered(begin, number):
    return [f"{begin}{index}" for index in range(number)]


def several(number, *makes):
    """Return a sequence of `number` sequences of these layers."""
    return nn.Sequential(*[nn.Sequential(*[make() for make in makes]) for _ in range(number)])


SHAPES = {
    "a list": (lambda: Model(number=5), numbered("layers.", 5)),
    "torch's encoder": (lambda: nn.Transformer(4, 2, 3, 1, 8).encoder, numbered("layers.", 3)),
    "encoder and decoder": (lambda: nn.Transformer(4, 2, 2, 2, 8),
                            numbered("encoder.layers.", 2) + numbered("decoder.layers.", 2)),
    "nested sequences": (lambda: several(4, lambda: nn.Linear(4, 4), nn.GELU), numbered("", 4)),
    "stages": (stages, numbered("0.", 3) + numbered("1.", 2) + numbered("2.", 3)),
    "two attentions in each": (lambda: nn.ModuleList([Decoding(), Decoding()]), numbered("", 2)),
    "experts": (lambda: nn.ModuleList([Mixture() for _ in range(3)]), numbered("", 3)),
    "lazy": (lambda: several(3, lambda: nn.LazyLinear(4), nn.ReLU), numbered("", 3)),
    "layers alone": (lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]), []),
    "unlike": (lambda: nn.ModuleList([Residual(4), Residual(5), Residual(6)]), []),
    "one block, twice": (lambda: nn.Sequential(*[Residual()] * 2), []),
    "without parameters": (lambda: several(3, nn.ReLU, nn.Dropout), []),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_found_in_models_of_all_shapes_and_none_inside_another(shape):
    make, expected = SHAPES[shape]
    model = make()
    assert names(model) == expected
    assert names(copy.deepcopy(model)) == expected
    blocks = repeated_blocks(model)
    inside = {id(part) for block in blocks for part in [*block.modules()][1:]}
    assert not inside & {id(block) for block in blocks}
