"""Run %%speedbench --tune as a user types it, and check how each view shows the found plan."""

import re

import pytest

from speedkit_jupyter import Facts, Hardware, plan
from speedkit_jupyter.rounds.statistics import Ratio
from speedkit_jupyter.search import learning
from speedkit_jupyter.support import database

pytestmark = [pytest.mark.usefixtures("trusted"), pytest.mark.long]

STEP = "loss = loss_fn(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()"
FUSED_HELPS = f"sleep(0.02 if optimizer.param_groups[0]['fused'] else 0.1); {STEP}"
GROUP = """
encoder, decoder = nn.Linear(8, 8), nn.Linear(8, 8)
parts = {'encoder': encoder, 'decoder': decoder}
both = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], 0.1)
inputs = torch.randn(4, 8)
"""
OF_GROUP = (
    "sleep(0.02 if both.param_groups[0]['fused'] else 0.1); "
    "decoder(encoder(inputs)).pow(2).mean().backward(); both.step(); both.zero_grad()"
)
NEXT_STEP = re.compile(r"^ *(%speedkit [^#\n]*?) +#", re.M)


def said(shell, line):
    return " ".join(shell.run(line).split())


@pytest.fixture
def timed(shell, made_time):
    shell.names["sleep"] = made_time.sleep
    return shell


@pytest.mark.smoke
def test_apply_puts_the_plan_into_force_and_the_next_time_at_once(timed):
    timed.run(f"%%speedbench -q --tune --apply --budget 12 -v tuning\n{FUSED_HELPS}")
    assert "fused_optimizer" in timed.names["tuning"].winner.name
    assert timed.names["ctx"].active
    assert {d.source for d in timed.names["ctx"].plan if d.active} == {"measured"}
    shown = timed.run(f"%%speedbench --tune --apply --budget 12 -v tuning\n{FUSED_HELPS}")
    assert timed.names["tuning"].learned is not None
    assert "Applied to" in shown


def learned(shell, models=("model",)):
    """Store a plan as an earlier session would have stored it."""
    held = [shell.names[word] for word in models]
    task = learning.Task("Sequential", ("8x1x8x8 float32",), trains=True)
    made = plan(facts=Facts.read(held[0]))
    where = learning.setting(held, Hardware.current())
    gain = {"channels_last": True}, "channels_last", Ratio(1.25, 1.2, 1.31, 50)
    learning.store(where, task, made, *gain)


def test_what_was_learned_is_listed_and_forgotten(shell):
    assert "Nothing learned" in shell.run("%speedkit tuned")
    learned(shell)
    shown = shell.run("%speedkit tuned list")
    for word in ("channels_last", "1.25×", "8x1x8x8 float32"):
        assert word in shown
    assert "Forgot 1" in shell.run("%speedkit tuned forget 1")
    assert "Nothing learned" in shell.run("%speedkit tuned")


def test_apply_uses_what_was_learned_unless_something_definite_is_asked_for(shell):
    learned(shell)
    assert "measured: channels_last 1.25× (1.20× to 1.31×)" in said(shell, "%speedkit report model")
    shell.run("%speedkit apply")
    on = {d.name: d.source for d in shell.names["ctx"].plan if d.active}
    assert on == {"channels_last": "measured"}
    shell.run("%speedkit apply --rules")
    assert shell.names["ctx"].plan["channels_last"].source == "auto"
    shown = said(shell, "%speedkit apply --fused_optimizer")
    assert shell.names["ctx"].plan["fused_optimizer"].source == "user"
    assert "Proven, but not in this plan: channels_last. `%speedkit apply model`" in shown


def test_apply_goes_by_rules_where_the_store_cannot_be_read(shell, monkeypatch, tmp_path):
    (tmp_path / "speedkit.sqlite").write_text("this is no database, but long enough to be read")
    monkeypatch.setenv("SPEEDKIT_DATA", str(tmp_path))
    assert "can't be used" in shell.run("%speedkit apply")
    assert shell.names["ctx"].active


def test_a_learned_plan_that_lacks_a_part_is_noted_and_ends_no_command(shell):
    database._note_once.cache_clear()
    where = learning.setting([shell.names["model"]], Hardware.current())
    database.learn(where, "task", {"name": "x", "values": {}, "speedup": 2})
    assert "plan 1 can't be read and is left out: it lacks device" in shell.run("%speedkit")
    for line in ("apply model", "tuned", "catalog", "panel model", "restore"):
        shell.run(f"%speedkit {line}")
    assert "Forgot 1" in shell.run("%speedkit tuned forget 1")


def test_a_plan_that_was_learned_for_several_models_is_applied_to_all_of_them(shell):
    shell.run("student = model; teacher = nn.Linear(4, 2); del model")
    learned(shell, models=("teacher", "student"))
    assert "measured: channels_last" not in said(shell, "%speedkit apply student")
    assert "measured: channels_last" in said(shell, "%speedkit apply student,teacher")


def test_the_printed_next_steps_put_the_plan_in_force_on_all_of_its_models(timed):
    timed.run(GROUP)
    lines = NEXT_STEP.findall(timed.run(f"%%speedbench --tune --budget 12 -v tuning\n{OF_GROUP}"))
    assert lines == [
        "%speedkit apply encoder,decoder", "%speedkit verify", "%speedkit code encoder",
        "%speedkit code decoder",
    ]  # fmt: skip
    shown = timed.run(lines[0])
    assert "Applied to encoder" in shown
    assert "Applied to decoder" in shown
    for name in ("ctx", "ctx_decoder"):
        assert timed.names[name].plan["fused_optimizer"].source == "measured"
    assert "= True" in timed.run(lines[2])


BY_PYTHON = f"""
from speedkit_jupyter import tune
def step():
    {FUSED_HELPS}
found = tune(step, budget_s=12, keep=('threads', 'tf32', 'gemm', 'compile'))"""
BY_MAGIC = f"%%speedbench --tune --budget 12 --keep threads,tf32,gemm,compile\n{FUSED_HELPS}"


@pytest.mark.smoke
@pytest.mark.sampled(2)
@pytest.mark.parametrize("search", [BY_MAGIC, BY_PYTHON], ids=["magic", "python"])
def test_a_plan_proven_after_another_was_applied_is_what_all_views_name(timed, machine, search):
    machine("cpu_avx512_bf16")
    assert "Worth measuring here" in said(timed, "%speedkit apply --fused_optimizer false")
    lines = NEXT_STEP.findall(timed.run(search))
    for view in ("%speedkit", "%speedkit report", "%speedkit panel"):
        told = said(timed, view)
        assert "Worth measuring" not in told, view
        assert "fused_optimizer is" in told or "measured: fused_optimizer" in told, view
    if search is BY_MAGIC:
        assert [line.split()[1] for line in lines] == ["apply", "verify", "code"]
        for line in lines:
            timed.run(line)
        assert timed.names["ctx"].plan["fused_optimizer"].source == "measured"
        assert "Tuned" not in said(timed, "%speedkit")
        assert "fused=True" in said(timed, "%speedkit code")
