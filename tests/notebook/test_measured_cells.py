"""Measured cells print once, and neither they nor applied plans keep a model alive."""

import gc
import io
import logging
import sys
import weakref

import pytest

from speedkit_jupyter.notebook import session
from speedkit_jupyter.notebook.cell import Cell
from speedkit_jupyter.step.step import Step

MADE = """
net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
opt = torch.optim.AdamW(net.parameters())
held = {'lm': net}
note(net)
"""
STEP = "loss_fn(net(x), y).backward(); opt.step(); opt.zero_grad()"
CELLS = {
    "applied and trained": f"%speedkit apply net --precision bf16 --channels_last true\n{STEP}",
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
    assert [reference() is not None for reference in made] == [False] * 4 + [True] * 2
    assert "ctx_net" not in shell.names
    shell.run("net = opt = held = None")
    gc.collect()
    assert not any(reference() is not None for reference in made)
    assert "No model" in shell.run("model = optimizer = None\n%speedkit")


@pytest.mark.parametrize("line", ["-n 2 -r 2", "--compare baseline,fused_optimizer --budget 0.05"])
def test_a_measured_model_is_freed_when_its_names_are_gone(shell, line):
    cell = "loss = model(x).sum(); loss.backward(); optimizer.step(); optimizer.zero_grad()"
    shell.run(cell)
    model = weakref.ref(shell.names["model"])
    gc.collect()
    gc.disable()
    try:
        shell.run(f"%%speedbench {line}\n{cell}")
        shell.run("model = optimizer = loss = None")
        assert model() is None
    finally:
        gc.enable()


def test_a_measured_cell_prints_and_logs_once(shell, monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "stderr", shown)
    logger = logging.getLogger("of_a_library")
    handler = logging.StreamHandler()  # holds the current stream, as handlers of libraries do
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)
    shell.ip.user_ns["logger"] = logger
    cell = Cell(shell.ip, "print('printed'); logger.warning('logged')")
    with Step(lambda context: None, ()).guarded():
        for _ in range(2):
            with cell.quiet():
                cell.run()
                cell.run()
    logger.warning("after it")
    assert shown.getvalue().splitlines() == ["printed", "logged", "after it"]


def test_a_failed_cell_is_not_the_last_cell(shell):
    shell.run("%%speedbench -n 1 -r 1 -q\nmodel(x)")
    shell.fails("%%speedbench\nmodel(x); 1 / 0")
    assert session.current().last_cell().title == "model(x)"
