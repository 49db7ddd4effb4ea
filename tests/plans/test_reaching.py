"""The line that apply tells the user to write, for a plan's precision to act in the loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups
from speedkit_jupyter.plans.applying import to_write, unreached

BF16 = SpeedConfig(precision="bf16").alone()


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def test_only_a_plan_that_lowers_a_precision_needs_a_block_in_the_users_words():
    model = net()
    with apply_speedups(model, BF16)[1] as context:
        assert to_write(context, "fast").startswith("Write `with fast.autocast():`")
    with apply_speedups(model, SpeedConfig(threads=1).alone())[1] as context:
        assert to_write(context) == ""


@pytest.mark.slow
@pytest.mark.parametrize("word", ["bf16", "fp16"])
def test_lightning_is_given_its_trainers_own_argument(word):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

    module, argument = Module(), {"bf16": "bf16-mixed", "fp16": "16-mixed"}[word]
    config = SpeedConfig(precision=word, grad_scaler=False).alone()
    for model, names in ((module, {}), (module.net, {"lit": module})):
        with apply_speedups(model, config)[1] as context:
            assert f'`Trainer(precision="{argument}")`' in to_write(context, "ctx", names)
    alone = net()
    with apply_speedups(alone, config)[1] as context:  # one that is no part of it
        assert "with ctx.autocast()" in to_write(context, "ctx", {"lit": module})


@pytest.mark.slow
def test_a_trainer_of_transformers_is_given_its_arguments(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import transformers

    class Mine(transformers.Trainer):
        """A trainer of the user's own."""

    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    model = net()
    names = {"trainer": Mine(model=model, args=arguments)}
    with apply_speedups(model, BF16)[1] as context:
        assert "`TrainingArguments(bf16=True)`" in to_write(context, "ctx", names)
        assert "with ctx.autocast()" in to_write(context, "ctx", {})


def test_what_has_not_entered_autocast_is_told_until_it_does():
    model = net()
    with apply_speedups(model, BF16)[1] as context:
        model(torch.ones(1, 4))
        assert "bf16 acts only inside `ctx.autocast()`" in unreached([model])
        with context.autocast():
            model(torch.ones(1, 4))
        assert unreached([model]) == ""
    assert unreached([model]) == ""
