"""What tuning has found is what every view speaks of, whatever is in force meanwhile."""

from __future__ import annotations

import gc
import weakref

import pytest
from torch import nn

from speedkit_jupyter import SpeedConfig, session

pytestmark = pytest.mark.usefixtures("trusted")
STEP = "loss = loss_fn(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()"
FUSED_HELPS = f"sleep(0.01 if optimizer.param_groups[0]['fused'] else 0.05); {STEP}"
NOTHING_HELPS = f"sleep(0.01); {STEP}"


def said(shell, line):
    return " ".join(shell.run(line).split())


@pytest.fixture
def tuned(shell, made_time, machine):
    """`tuned(step)`: a search after the rules' plan was applied, as README's order has it."""
    machine("cpu_avx512_bf16")
    shell.names["sleep"] = made_time.sleep

    def go(step):
        assert "Worth measuring here" in said(shell, "%speedkit apply --fused_optimizer false")
        return shell.run(
            f"%%speedbench --tune --budget 30 --keep threads,tf32,gemm,compile\n{step}"
        )

    return go


@pytest.mark.smoke
def test_a_plan_that_was_proven_after_another_was_applied_is_what_all_views_name(shell, tuned):
    shown = tuned(FUSED_HELPS)
    lines = [line.strip() for line in shown.splitlines() if line.strip().startswith("%speedkit ")]
    assert [line.split()[1] for line in lines] == ["apply", "verify", "code"]
    for view in ("%speedkit", "%speedkit report", "%speedkit panel"):
        told = said(shell, view)
        assert "Worth measuring" not in told, view
        assert "fused_optimizer is" in told or "measured: fused_optimizer" in told, view
    code = said(shell, "%speedkit code")
    assert "fused=True" in code
    assert "not in force yet" in code
    for line in lines:
        shell.run(line)
    assert shell.names["ctx"].plan["fused_optimizer"].source == "measured"
    assert "Tuned" not in said(shell, "%speedkit")
    assert "not in force" not in said(shell, "%speedkit code")


def test_what_was_found_is_known_for_a_model_without_a_hash_and_keeps_none_alive():
    model = type("Equal", (nn.Linear,), {"__eq__": lambda self, other: False, "__hash__": None})(
        2, 2
    )
    known = session.Session()
    known.tuned([model], found := session.Found(SpeedConfig(), "bf16 is faster"))
    assert known.found_for(model) is found
    assert known.found_for(nn.Linear(2, 2)) is None
    assert known.found_for(None) is None
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_what_the_function_tune_has_found_is_what_all_views_name(shell, made_time, machine):
    machine("cpu_avx512_bf16")
    shell.names["sleep"] = made_time.sleep
    said(shell, "%speedkit apply --fused_optimizer false")
    shell.run(
        "import speedkit_jupyter\n"
        f"def step():\n    {FUSED_HELPS}\n"
        "kept = ('threads', 'tf32', 'gemm', 'compile')\n"
        "found = speedkit_jupyter.tune(step, budget_s=30, keep=kept)"
    )
    for view in ("%speedkit", "%speedkit report", "%speedkit panel"):
        told = said(shell, view)
        assert "Worth measuring" not in told, view
        assert "fused_optimizer is" in told or "measured: fused_optimizer" in told, view
    assert "not in force yet" in said(shell, "%speedkit code")
