"""Test that generated code calls every kind of model with the arguments that it takes."""

import copy
from collections import UserDict
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from speedkit_jupyter import Facts, SpeedConfig, SpeedKitError, apply_speedups, code, plan
from speedkit_jupyter.codegen.script import call_of
from speedkit_jupyter.machines import flags


class PreTrainedModel(nn.Module):
    """Model that SpeedKit takes for a transformers model, because of its class name."""


def kind_of_model(forward, base: type = nn.Module) -> type:
    class Made(base):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

    Made.forward = forward
    return Made


def loss_of(self, left, labels):
    return nn.functional.mse_loss(self.layer(left), labels)


def transformer(self, left=None, labels=None):
    return UserDict(loss=loss_of(self, left, labels))


class Wrapper(nn.Module):
    """Wrapper that passes all arguments on, like DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.module = kind_of_model(transformer, PreTrainedModel)()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class LightningModule(nn.Module):
    """Model that SpeedKit takes for a Lightning model. Its step also calls a part directly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.more = nn.ModuleDict({"one": nn.ModuleList([nn.Linear(4, 4)])})

    def forward(self, x):
        return self.head(self.layer(x))

    def training_step(self, batch, index):
        more = self.more["one"][0](self.layer(batch[0]))
        return nn.functional.mse_loss(self(batch[0]), batch[1]) + more.mean()


class Shape(NamedTuple):
    model: type
    given: tuple[str, ...]


FORWARDS = {
    "plain": lambda self, x: self.layer(x),
    "several": lambda self, left, right, scale=1.0: self.layer(left + right) * scale,
    "keywords": lambda self, *, left, right: self.layer(left + right),
    "nothing": lambda self: self.layer(torch.ones(8, 4)),  # no input
    "labelled": lambda self, left, labels=None: {"loss": loss_of(self, left, labels)},
    "headless": lambda self, left=None, mask=None: self.layer(left),  # the loss is the user's
}
GIVEN = {"plain": ("x", "y"), "several": ("pair", "y"), "keywords": ("unlabelled", "y"),
         "nothing": ("none", "y"), "labelled": ("batch",), "headless": ("plain", "y")}  # fmt: skip
BASES = {"headless": PreTrainedModel}
SHAPES = {
    **{one: Shape(kind_of_model(forward, BASES.get(one, nn.Module)), GIVEN[one])
       for one, forward in FORWARDS.items()},
    "transformer": Shape(kind_of_model(transformer, PreTrainedModel), ("batch",)),
    "wrapper": Shape(Wrapper, ("batch",)),
    "lightning": Shape(LightningModule, ("pair_of_batch",)),
}  # fmt: skip
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
OPTIMIZERS = {
    "adamw": lambda net: {"opt": torch.optim.AdamW(net.parameters(), 0.1)},
    "two": lambda net: {f"o{i}": torch.optim.SGD([p], 0.1) for i, p in enumerate(net.parameters())},
}


def made(shape: Shape):
    torch.manual_seed(0)
    return shape.model()


def given() -> dict:
    torch.manual_seed(1)
    left, right, y = torch.rand(8, 4), torch.rand(8, 4), torch.rand(8, 2)
    return {
        "x": left, "y": y, "targets": y, "pair": (left, right), "none": (),
        "pair_of_batch": (left, y), "batch": {"left": left, "labels": y}, "plain": {"left": left},
        "unlabelled": {"left": left, "right": right}, "loss_fn": nn.functional.mse_loss,
    }  # fmt: skip


def trained(model: nn.Module, held: dict, text: str, arguments: list) -> list:
    """Run generated code for three steps; return the losses and the model's parameters."""
    names = held | {"net": model}
    exec(compile(text, "generated", "exec"), names)
    copied = copy.deepcopy(model)
    own = vars(copied).get("forward")
    assert own is None or own.__self__ is copied
    losses = [names["train_step"](*arguments) for _ in range(3)]
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def in_three_ways(shape: Shape, optimizers: str, **config) -> list[list]:
    """Train under a plan, with the plan's code, and with the plain loop; return all results."""
    arguments = [given()[one] for one in shape.given]
    arguments += [nn.functional.mse_loss] if shape.given[-1] == "y" else []
    models = [made(shape) for _ in range(3)]
    applied, coded, plain = (OPTIMIZERS[optimizers](model) for model in models)
    facts, listed = Facts.read(models[0], list(applied.values())), list(applied.values())
    as_written = plan(SpeedConfig().alone(), facts=facts)
    loop = code(as_written, "torch", applied, model=models[0], name="net")
    config = SpeedConfig(**config).alone()
    with apply_speedups(models[0], config, optimizer=listed)[1] as context:
        text = code(context, "torch", applied, name="net")
        assert "Yours: `net`" in text
        first = trained(models[0], applied, loop, arguments)
    second = trained(models[1], coded, text, arguments)
    return [first, second, trained(models[2], plain, loop, arguments)]


@pytest.mark.parametrize(("precision", "optimizers"), [("bf16", "adamw"), ("fp16", "two")])
@every_shape
def test_the_code_of_a_plan_computes_the_same_bits_as_the_plan(shape, optimizers, precision):
    applied, coded, plain = in_three_ways(shape, optimizers, precision=precision)
    assert all(map(torch.equal, applied, coded))
    assert not all(map(torch.equal, applied, plain))


class Attending(nn.Module):
    """Model of a convolution and attention that records torch's flags in each call."""

    seen: list = []

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(2, 6, (2, 1), padding=1), nn.Linear(2, 2)

    def forward(self, x):
        self.seen.append(flags.snapshot())
        q, k, v = self.into(x.view(8, 2, 2, 1)).flatten(2).mT[:, None].chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).mean((1, 2)))


@pytest.mark.usefixtures("changing_flags", "two_threads")
@pytest.mark.parametrize(
    "config", [{"channels_last": True}, {"sdpa": "math", "precision": "bf16", "threads": 1}]
)
def test_the_code_of_a_plan_has_the_same_switches_and_layouts_as_the_plan(config):
    Attending.seen.clear()
    applied, coded, _ = in_three_ways(Shape(Attending, ("x", "y")), "adamw", **config)
    assert all(map(torch.equal, applied, coded))
    assert [one.stride() for one in applied] == [one.stride() for one in coded]
    changes = flags.diff(Attending.seen[0], Attending.seen[3])
    assert {change.name for change in changes} <= {"compiler.cache_key_tag"}


@pytest.mark.compile
@pytest.mark.parametrize("name", ["plain", "lightning"])
def test_the_code_of_a_compiled_plan_computes_the_same_bits(name):
    compile = {"enabled": True, "backend": "eager", "scope": "model"}
    applied, coded, _ = in_three_ways(SHAPES[name], "adamw", precision="bf16", compile=compile)
    assert all(map(torch.equal, applied, coded))


@every_shape
def test_generated_code_predicts_without_an_optimizer(shape):
    model = made(shape)
    text = code(plan(facts=Facts.read(model)), "torch", model=model, name="net")
    names = {"net": model}
    exec(compile(text, "generated", "exec"), names)
    batch = given()["x" if shape.model is LightningModule else shape.given[0]]
    assert names["predict"](batch) is not None


@every_shape
def test_a_batch_is_moved_whatever_its_form(shape):
    call, everything = call_of(made(shape)), given()
    word = "batch" if call.own_loss else call.given
    names = {word: everything[shape.given[0]], "targets": everything["y"], "torch": torch}
    names["tree_map_only"] = tree_map_only
    if call.inputs == "**batch":
        names["batch"] = UserDict(names["batch"])  # like a batch from the transformers library
    exec("\n".join(call.moved(".double()", trains=True)), names)
    moved = [names[word]] if call.own_loss else [names[word], names["targets"]]
    assert {one.dtype for one in tree_leaves(moved)} == {torch.float64}


@pytest.mark.parametrize("word", ["models['lm']", "trainer.net", "layers[0]", "loss"])
def test_the_users_model_and_optimizer_are_assigned_first(word):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters())
    found = plan(SpeedConfig(fused_optimizer=False), facts=Facts.read(model, [optimizer]))
    text = code(found, "torch", {"solver": optimizer}, model=model, name=word)
    assert f"\nmodel, optimizer = {word}, solver\n" in text
    assert f"Yours: `{word}`, `solver`." in text
    names = given() | {
        "models": {"lm": model}, "trainer": SimpleNamespace(net=model), "layers": [model],
        "loss": model, "solver": optimizer,
    }  # fmt: skip
    exec(compile(text, "generated", "exec"), names)
    names["train_step"](names["x"], names["y"], nn.functional.mse_loss)


def test_under_a_scheduler_all_settings_are_those_of_the_beginning():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, betas=(0.8, 0.99))
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    text = code(plan(facts=Facts.read(model, [optimizer])), "torch", [optimizer])
    assert "betas=(0.8, 0.99)" in text


def test_what_a_signature_does_not_tell_is_the_plain_call():
    assert call_of(None).inputs == "inputs"
    assert call_of(nn.Identity()).inputs == "inputs"
    assert call_of(torch.jit.script(nn.Linear(2, 2))).inputs == "inputs"
    assert call_of(nn.Sequential(nn.Linear(2, 2))).inputs == "inputs"
    assert call_of(nn.Transformer(4, 2, 1, 1, 4)).inputs == "*inputs"


def test_an_optimizer_that_calls_the_model_itself_gets_no_loop():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(SpeedKitError, match="LBFGS steps by a closure: there is no code"):
        code(plan(facts=Facts.read(model, [optimizer])), "torch", [optimizer])
