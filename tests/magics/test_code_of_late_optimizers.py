"""Code of an applied plan has the optimizers that were made after it."""

from __future__ import annotations

import pytest

LATE = """\
del optimizer
%speedkit apply model
opt = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.2)
loss_fn(model(x), y).backward(); opt.step(); opt.zero_grad()"""
LINE = "opt = torch.optim.AdamW(model.parameters(), lr=0.0003, weight_decay=0.2, fused=True)"


@pytest.mark.parametrize("line", ["", " --optimizer opt"])
def test_an_optimizer_that_the_plan_met_later_is_in_its_code(shell, line):
    shell.run(LATE)
    shown = shell.run(f"%speedkit code{line}")
    assert LINE in " ".join(shown.replace("(\n    ", "(").replace(",\n)", ")").split())
    assert "made later" not in shown
    shell.run("%speedkit restore")
    assert shell.names["opt"].param_groups[0]["fused"] is None


def test_an_optimizer_that_has_not_stepped_yet_can_be_named(shell):
    shell.run(LATE.rsplit("\n", 1)[0])
    assert "fused=True" in shell.run("%speedkit code --optimizer opt")


def test_code_without_any_optimizer_promises_nothing_that_only_an_extension_does(shell):
    shell.run("del optimizer\n%speedkit apply model")
    assert "made later" not in shell.run("%speedkit code")


def test_an_optimizer_of_another_model_is_refused(shell):
    shell.run("%speedkit apply model\nother = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)")
    assert "holds no parameter" in str(shell.fails("%speedkit code --optimizer other"))
