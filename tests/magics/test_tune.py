"""%%speedbench --tune as a user types it."""

from __future__ import annotations

import pytest
import torch
from IPython.core.error import UsageError

STEP = "loss = loss_fn(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()"


def test_it_says_what_to_do_and_applies_nothing(shell):
    before = [p.detach().clone() for p in shell.names["model"].parameters()]
    shown = shell.run(f"%%speedbench --tune --budget 2 -v tuning\n{STEP}")
    tuning = shell.names["tuning"]
    assert ("confirmed in fresh rounds" in " ".join(shown.split())) is tuning.helped
    assert "nothing is applied" in shown
    assert all(map(torch.equal, before, shell.names["model"].parameters()))
    assert "loss" not in shell.names
    tried = {one.name for one in tuning.rejected} | {tuning.winner.name}
    assert {"channels_last", "fused_optimizer", "compile"} & tried
    for context in tuning.apply():
        assert context.active
        context.restore()


def test_memory_is_an_objective(shell):
    shell.run(f"%%speedbench -q --tune --budget 2 --objective memory -v tuning\n{STEP}")
    assert shell.names["tuning"].objective == "memory"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--tune --compare baseline,auto", ["--compare", "--tune"]),
        ("--tune -n 3", ["-n", "--tune"]),
        ("--tune --objective speed", ["speed", "time"]),
        ("--tune --steps 0", ["1 or more"]),
        ("--tune --budget 0", ["positive"]),
        ("--tune bf16", ["bf16", "earlier cell"]),
        ("--steps 5", ["--steps", "--tune"]),
        ("--compare baseline,auto --objective time", ["--objective", "--tune"]),
    ],
)
def test_a_wrong_line_is_one_usage_error(shell, line, words):
    error = shell.fails(f"%%speedbench {line}\n{STEP}")
    assert isinstance(error, UsageError)
    for word in words:
        assert word in str(error)
