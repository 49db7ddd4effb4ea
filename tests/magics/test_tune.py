"""%%speedbench --tune as a user types it."""

from __future__ import annotations

import pytest
import torch
from IPython.core.error import UsageError

pytestmark = pytest.mark.usefixtures("trusted")

STEP = "loss = loss_fn(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()"


@pytest.mark.checked
@pytest.mark.slow
def test_it_says_what_to_do_and_applies_nothing(shell):
    before = [p.detach().clone() for p in shell.names["model"].parameters()]
    shown = shell.run(f"%%speedbench --tune --budget 2 -v tuning\n{STEP}")
    tuning = shell.names["tuning"]
    assert ("confirmed in fresh rounds" in " ".join(shown.split())) is tuning.helped
    assert "is undone" in shown
    assert all(map(torch.equal, before, shell.names["model"].parameters()))
    assert "loss" not in shell.names
    tried = {one.name for one in tuning.rejected} | {tuning.winner.name}
    assert any("channels_last" in name for name in tried)
    for context in tuning.apply():
        assert context.active
        context.restore()


@pytest.mark.smoke
def test_apply_puts_the_plan_into_force_and_the_next_time_at_once(shell, made_time):
    shell.names["sleep"] = made_time.sleep
    step = f"sleep(0.01 if optimizer.param_groups[0]['fused'] else 0.05); {STEP}"
    shell.run(f"%%speedbench -q --tune --apply --budget 9 -v tuning\n{step}")
    assert "fused_optimizer" in shell.names["tuning"].winner.name
    assert shell.names["ctx"].active
    assert {d.source for d in shell.names["ctx"].plan if d.active} == {"measured"}
    shown = shell.run(f"%%speedbench --tune --apply --budget 9 -v tuning\n{step}")
    assert shell.names["tuning"].learned is not None
    assert "Applied to" in shown


def learned(shell, values=None, name="channels_last"):
    """A plan as an earlier session would have left it."""
    from speedkit_jupyter import Facts, Hardware, plan
    from speedkit_jupyter.measure.results.statistics import Ratio
    from speedkit_jupyter.tuning import learning

    model = shell.names["model"]
    task = learning.Task("Sequential", ("8x1x8x8 float32",), trains=True)
    values = values or {"channels_last": True}
    made = plan(facts=Facts.read(model))
    where = learning.setting([model], Hardware.current())
    learning.keep(where, task, made, values, name, Ratio(1.25, 1.2, 1.31, 50))


def test_what_was_learned_is_listed_and_forgotten(shell):
    assert "Nothing learned" in shell.run("%speedkit tuned")
    learned(shell)
    shown = shell.run("%speedkit tuned list")
    assert "channels_last" in shown
    assert "1.25×" in shown
    assert "8x1x8x8 float32" in shown
    error = shell.fails("%speedkit tuned forget 99")
    assert isinstance(error, UsageError)
    assert "99" in str(error)
    assert "which NUMBER" in str(shell.fails("%speedkit tuned forget"))
    assert "Forgot 1" in shell.run("%speedkit tuned forget 1")
    assert "Nothing learned" in shell.run("%speedkit tuned")


def test_apply_uses_what_was_learned_unless_something_definite_is_asked_for(shell):
    learned(shell)
    shown = " ".join(shell.run("%speedkit report model").split())  # lines are wrapped
    assert "measured: channels_last 1.25x [1.20, 1.31]" in shown
    shell.run("%speedkit apply")
    on = {d.name: d.source for d in shell.names["ctx"].plan if d.active}
    assert on == {"channels_last": "measured"}
    shell.run("%speedkit apply --rules")
    assert shell.names["ctx"].plan["channels_last"].source == "auto"
    shell.run("%speedkit apply --fused_optimizer")
    assert shell.names["ctx"].plan["fused_optimizer"].source == "user"
    shell.run("%speedkit restore")


def test_apply_goes_by_rules_where_the_store_cannot_be_read(shell, monkeypatch, tmp_path):
    (tmp_path / "speedkit.sqlite").write_text("this is no database, but long enough to be read")
    monkeypatch.setenv("SPEEDKIT_DATA", str(tmp_path))
    assert "can't be used" in shell.run("%speedkit apply")
    assert shell.names["ctx"].active
    shell.run("%speedkit restore")
