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
