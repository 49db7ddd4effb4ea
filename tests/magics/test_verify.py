"""%speedkit verify as a user types it."""

from __future__ import annotations

import pytest
import torch

STEP = "loss = loss_fn(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()"


@pytest.mark.smoke
def test_it_takes_the_last_speedbench_cell(shell):
    before = [p.detach().clone() for p in shell.names["model"].parameters()]
    shell.run(f"%%speedbench -q -n 1 -r 1\n{STEP}")
    shown = shell.run("%speedkit verify --plan bf16 --steps 5 -v found")
    assert "same loss curve as the baseline over 5 calls" in " ".join(shown.split())
    assert shell.names["found"].plan == {"precision": "bf16"}
    assert all(map(torch.equal, before, shell.names["model"].parameters()))
    assert "loss" not in shell.names


def test_it_takes_a_function_by_name_and_the_plan_in_force(shell, machine):
    machine("cpu")
    shell.run(f"def train_step():\n    {STEP}")
    shell.run("%speedkit apply --precision bf16 --fused_optimizer false --channels_last false")
    shown = shell.run("%speedkit verify --step train_step --steps 4")
    assert "current (bf16)" in " ".join(shown.split())
    shell.run("%speedkit restore")


def test_a_step_that_takes_a_batch_is_refused_in_one_line(shell):
    shell.run("def train_step(batch): return model(batch).sum().backward()")
    error = shell.fails("%speedkit verify --step train_step")
    assert "train_step takes a batch" in str(error)
