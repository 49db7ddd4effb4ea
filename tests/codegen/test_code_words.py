"""The user's own names in generated code, and what each form says of a fused optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups, code
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.plans.planning import plan

FUSED = SpeedConfig(fused_optimizer=True).alone()


@pytest.mark.parametrize("name", ["os_", "_o", "__o__", "opt", "o1", "größe_"])
def test_a_name_is_kept_to_the_letter(name):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    found = plan(FUSED, facts=Facts.read(model, [optimizer]))
    text = code(found, optimizers={name: optimizer}, model=model)
    assert f"\n{name} = torch.optim.AdamW(" in text
    assert f"    {name}.step()" in text


@pytest.mark.parametrize(("name", "told"), [(None, True), ("AdamW", True), ("SGD", False)])
def test_trainer_is_told_to_make_its_own_adamw_with_the_fused_kernel(name, told):
    config = SpeedConfig.from_dict({"fused_optimizer": {"enabled": True, "name": name}}).alone()
    model = nn.Linear(2, 2)
    with apply_speedups(model, config)[1] as context:
        text = code(context, "transformers")
    assert ('optim="adamw_torch_fused"' in text) == told


def test_every_kind_of_optimizer_that_was_made_later_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with apply_speedups(model, FUSED)[1] as context:
        adam = torch.optim.Adam(model[0].parameters())
        others = [torch.optim.AdamW(model[1].parameters()) for _ in range(2)]
        model(torch.rand(1, 2)).sum().backward()
        for one in (adam, *others):
            one.step()
        note = context.target.notes["fused_optimizer"]
        assert note == "Adam and AdamW, made after the plan: fused too"
