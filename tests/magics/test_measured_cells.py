"""What a cell measured dies with its last name."""

from __future__ import annotations

import gc
import weakref

import pytest


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
