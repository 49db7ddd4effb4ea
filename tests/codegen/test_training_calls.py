"""The loop that apply prints, and generated code, call every kind of model as it asks: they run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, SpeedConfig, SpeedKitError, apply_speedups, code, plan
from speedkit_jupyter.codegen.training_loop import Words, call_of, loop


class PreTrainedModel(nn.Module):
    """By this name a model of transformers is known, whether that is installed or not."""


def kind_of_model(forward, base: type = nn.Module) -> type:
    """A class with one layer and this forward."""

    class Made(base):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

    Made.forward = forward
    return Made


def loss_of(self, left, labels):
    return nn.functional.mse_loss(self.layer(left), labels)


def transformer(self, left=None, labels=None):
    return SimpleNamespace(loss=loss_of(self, left, labels))


class Wrapper(nn.Module):
    """As DistributedDataParallel: passes everything on."""

    def __init__(self) -> None:
        super().__init__()
        self.module = kind_of_model(transformer, PreTrainedModel)()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class Shape(NamedTuple):
    """A model, how it is called, and what a step of it is given."""

    model: type
    call: str
    given: tuple[str, ...]


SHAPES = {
    "plain": Shape(
        kind_of_model(lambda self, x: self.layer(x)), "net(inputs)", ("x", "y")
    ),
    "several": Shape(
        kind_of_model(lambda self, left, right, scale=1.0: self.layer(left + right) * scale),
        "net(*inputs)", ("pair", "y"),
    ),
    "keywords": Shape(
        kind_of_model(lambda self, *, left, right: self.layer(left + right)),
        "net(**batch)", ("unlabelled", "y"),
    ),
    "nothing": Shape(  # a model that learns its output, as generators of images do
        kind_of_model(lambda self: self.layer(torch.ones(8, 4))), "net(*inputs)", ("none", "y")
    ),
    "labelled": Shape(
        kind_of_model(lambda self, left, labels=None: {"loss": loss_of(self, left, labels)}),
        "net(**batch)", ("batch",),
    ),
    "object": Shape(kind_of_model(transformer), "net(**batch)", ("batch",)),
    "transformer": Shape(
        kind_of_model(transformer, PreTrainedModel), "net(**batch).loss", ("batch",)
    ),
    "headless": Shape(  # without labels: the loss is the user's
        kind_of_model(lambda self, left=None, mask=None: self.layer(left), PreTrainedModel),
        "net(**batch)", ("plain", "y"),
    ),
    "wrapper": Shape(Wrapper, "net(**batch).loss", ("batch",)),
}  # fmt: skip
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
OPTIMIZERS = {
    "adamw": lambda net: {"opt": torch.optim.AdamW(net.parameters(), 0.1)},
    "two": lambda net: {
        f"opt_{i}": torch.optim.SGD([p], 0.1) for i, p in enumerate(net.parameters())
    },
}


def made(shape: Shape):
    torch.manual_seed(0)
    return shape.model()


def given() -> dict:
    torch.manual_seed(1)
    left, right, y = torch.rand(8, 4), torch.rand(8, 4), torch.rand(8, 2)
    return {
        "x": left, "y": y, "targets": y, "pair": (left, right), "none": (),
        "batch": {"left": left, "labels": y}, "plain": {"left": left},
        "unlabelled": {"left": left, "right": right}, "loss_fn": nn.functional.mse_loss,
    }  # fmt: skip


def moved(before: list, model) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_plan_whose_precision_acts_in_the_model_needs_no_edit(precision):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    config = SpeedConfig(precision=precision).alone()
    with apply_speedups(model, config, optimizer=optimizer)[1] as context:
        assert loop(context, Words("net", {"solver": optimizer}, "fast")) == ""


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizers", OPTIMIZERS)
@every_shape
def test_generated_code_runs_and_trains(shape, optimizers, precision):
    model = made(shape)
    held = OPTIMIZERS[optimizers](model)
    config = SpeedConfig(precision=precision).alone()
    found = plan(config, facts=Facts.read(model, list(held.values())))
    text = code(found, "torch", held, model=model, name="net")
    assert "Yours: `net`" in text
    names = given() | held | {"net": model}
    exec(compile(text, "generated", "exec"), names)
    before = [p.detach().clone() for p in model.parameters()]
    arguments = [names[one] for one in shape.given]
    more = [nn.functional.mse_loss] if shape.given[-1] == "y" else []
    for _ in range(2):
        assert names["train_step"](*arguments, *more).isfinite()
    assert moved(before, model)


@every_shape
def test_generated_code_predicts_without_an_optimizer(shape):
    model = made(shape)
    text = code(plan(facts=Facts.read(model)), "torch", model=model, name="net")
    names = {"net": model}
    exec(compile(text, "generated", "exec"), names)
    assert names["predict"](given()[shape.given[0]]) is not None


@pytest.mark.parametrize("word", ["models['lm']", "trainer.net", "layers[0]", "loss"])
def test_the_users_model_and_optimizer_are_assigned_first(word):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters())
    config = SpeedConfig(fused_optimizer=False)
    found = plan(config, facts=Facts.read(model, [optimizer]))
    text = code(found, "torch", {"solver": optimizer}, model=model, name=word)
    assert f"\nmodel, optimizer = {word}, solver\n" in text
    assert f"Yours: `{word}`, `solver`." in text
    names = given() | {
        "models": {"lm": model}, "trainer": SimpleNamespace(net=model), "layers": [model],
        "loss": model, "solver": optimizer,
    }  # fmt: skip
    exec(compile(text, "generated", "exec"), names)
    names["train_step"](names["x"], names["y"], nn.functional.mse_loss)


class LightningModule(nn.Linear):
    """By this name a model of Lightning is known."""

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self(batch[0]), batch[1])


def test_a_lightning_module_computes_its_own_loss_from_a_batch():
    model = LightningModule(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = plan(facts=Facts.read(model, [optimizer]))
    names = {"model": model, "opt": optimizer}
    exec(code(found, "torch", {"opt": optimizer}, model=model), names)
    assert names["train_step"]((torch.ones(3, 4), torch.ones(3, 2))).isfinite()


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
