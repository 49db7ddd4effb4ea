"""Models that the notebook's names have left: nothing of ours keeps them, nor their parameters."""

from __future__ import annotations

import gc
import weakref

import pytest

MADE = """
net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
opt = torch.optim.AdamW(net.parameters())
held = {'lm': net}
note(net)
"""
STEP = "loss_fn(net(x), y).backward(); opt.step(); opt.zero_grad()"
CELLS = {
    "applied": "%speedkit apply net",
    "applied for bf16 and trained": f"%speedkit apply net --precision bf16\n{STEP}",
    "in another layout": f"%speedkit apply net --channels_last true\n{STEP}",
    "by another word": "del net, opt\n%speedkit apply held['lm']",
    "timed": "%speedkit apply net\nget_ipython().run_cell_magic('speedbench', '-n 1 -r 1', STEP)",
    "reported": "%speedkit apply net\n%speedkit report\n%speedkit",
}


@pytest.mark.parametrize("what", CELLS)
def test_a_cell_that_makes_a_model_and_is_run_again_holds_no_earlier_one(shell, what):
    made: list[weakref.ref] = []
    shell.names["note"] = lambda net: made.extend(map(weakref.ref, (net, next(net.parameters()))))
    shell.names["STEP"] = STEP
    for _ in range(3):
        shell.run(f"{MADE}\n{CELLS[what]}")
    gc.collect()
    alive = [reference() is not None for reference in made]
    assert alive == [False] * 4 + [True] * 2
    assert "ctx_net" not in shell.names
    shell.run("net = opt = held = None")
    gc.collect()
    assert not any(reference() is not None for reference in made)
    assert "No model" in shell.run("model = optimizer = None\n%speedkit")


def test_the_context_of_a_model_that_is_gone_says_so_and_does_nothing(shell):
    shell.run(f"{MADE.replace('note(net)', '')}\n%speedkit apply net --precision bf16")
    shell.run("net = opt = held = None")
    gc.collect()
    context = shell.names["ctx"]
    assert context.restored
    assert context.model is None
    assert context.changes() == ()
    shell.run("with ctx.autocast():\n    seen = torch.is_autocast_enabled('cpu')\nctx.restore()")
    assert shell.names["seen"] is False
