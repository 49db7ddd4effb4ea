"""%%speedbench --profile, %speedkit verify and `--accuracy` as a user types them."""

import json

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


# --- accuracy ---

EVALUATE = """
def evaluate(net):
    net.eval()
    with torch.no_grad():
        return float((net(x).argmax(1) == y).float().mean())
"""


def test_a_comparison_takes_a_function(shell):
    line = "--compare baseline,bf16 --budget 0.1 -v found --accuracy evaluate"
    shell.run(f"{EVALUATE}\nget_ipython().run_cell_magic('speedbench', '{line}', 'model(x)')")
    assert all(0 <= record.score <= 1 for record in shell.names["found"].records)
    assert shell.names["model"].training


@pytest.mark.smoke
def test_the_parts_of_a_step_stand_in_a_table(shell):
    shown = shell.run(f"%%speedbench --profile --budget 0.5 -v found\n{STEP}")
    for word in ("forward", "backward", "optimizer", "rest", "share", "a step:"):
        assert word in shown
    found = shell.names["found"]
    assert sum(row["share"] for row in found.rows()) == pytest.approx(1)
    assert json.loads(found.to_json())["steps"] == 1
    assert "loss" not in shell.names


def test_a_line_that_waits_is_named_by_its_cell_and_line(shell):
    shell.run("def total(loss):\n    return loss.item()")
    shown = shell.run(
        f"%%speedbench --profile --budget 0.5 -v found\n{STEP}\nprinted = total(loss)\n"
        "again = float(loss)"
    )
    rows = shell.names["found"].to_dict()["synchronizations"]
    places = {row["source"]: row["place"] for row in rows}
    assert places["return loss.item()"].startswith("cell ")
    assert places["return loss.item()"].endswith("line 2")
    assert places["again = float(loss)"].endswith("line 4")
    assert "return loss.item()" in shown
