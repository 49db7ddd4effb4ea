"""Compare plans by %%speedbench, as a user types it."""

import pytest
from IPython.core.error import UsageError
from training import everything, is_lowered

from speedkit_jupyter import StateWarning

pytestmark = pytest.mark.usefixtures("trusted")

STEP = "loss = loss_fn(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()"


def bench(line: str, cell: str = STEP) -> str:
    """Return a cell that compares baseline and auto, or the plans that the line names."""
    names = "" if "--compare" in line else "--compare baseline,auto "
    return f"%%speedbench {names}{line}\n{cell}"


@pytest.mark.checked
@pytest.mark.smoke
def test_a_step_prints_once_and_everything_is_as_before(shell):
    shell.run(STEP)  # so that there are optimizer states
    model, optimizer = shell.names["model"], shell.names["optimizer"]
    before, loss = everything(model, optimizer), shell.names["loss"]
    states = [id(s["exp_avg"]) for s in optimizer.state.values()]
    assert states

    shown = shell.run(bench("--budget 0.3", f"noise = torch.rand(3)\nprint('hello')\n{STEP}"))
    assert shown.count("hello") == 1
    assert everything(model, optimizer) == before
    assert states == [id(s["exp_avg"]) for s in optimizer.state.values()]

    assert shell.names["loss"] is loss
    assert "noise" not in shell.names


def test_what_cant_be_put_back_is_an_error_if_the_user_asks(shell, tmp_path):
    shell.names |= {"log": tmp_path / "log", "StateWarning": StateWarning}
    shell.run("import warnings; warnings.simplefilter('error', StateWarning)")
    cell = bench("--budget 0.1", f"open(log, 'a').write('x')\n{STEP}")
    assert isinstance(shell.fails(cell), StateWarning)
    assert not shell.names["log"].exists()


@pytest.mark.parametrize(
    "line", ["%time train()", "globals()['train']()", "get_ipython().run_cell('train()')"]
)
def test_code_that_names_what_it_calls_as_text_is_seen_through(shell, line):
    shell.run(f"n = 0\ndef train():\n    global n, new\n    n, new = n + 1, 1\n    {STEP}")
    before = shell.run("model[0].weight, n, 'new' in globals()")
    shell.run(f"%%speedbench --compare baseline,fused_optimizer --budget 0.05\n{line}")
    assert shell.run("model[0].weight, n, 'new' in globals()") == before


@pytest.mark.parametrize(
    "cell",
    ["with ctx.autocast(): seen.put(is_lowered(model)); model(x)",
     "seen.put(is_lowered(model)); model(x)\n" + STEP],
    ids=["ctx", "plain"],
)  # fmt: skip
def test_a_cell_gets_the_variants_precision_with_or_without_ctx(shell, seen, cell):
    shell.names["is_lowered"] = is_lowered
    shell.run(bench("--compare baseline,bf16 --budget 0.3", cell))
    assert set(seen()) == {True, False}
    assert "ctx" not in shell.names


@pytest.mark.parametrize(
    ("cell", "told"),
    [("a = 1\nloss = (model(x)", "line 3"), ("await model(x)", "outside"), ("return 5", "outside")],
)
def test_a_syntax_error_in_the_cell_is_shown_with_its_line(shell, cell, told):
    for line in ("%%speedbench", "%%speedbench --compare baseline,auto"):
        error = shell.fails(f"{line}\n{cell}")
        assert isinstance(error, UsageError)
        assert "SyntaxError: " in str(error)
        assert told in str(error)


@pytest.mark.checked
@pytest.mark.smoke
def test_each_variant_has_a_row_with_memory(shell):
    shown = shell.run(bench("--compare baseline,auto,fused_optimizer --budget 0.5 -v found"))
    rows = [line.split()[0] for line in shown.splitlines() if line.strip()]
    assert {"baseline", "auto", "fused_optimizer"} <= {*rows}
    assert "memory" in shown
    assert "more note" in shown
    assert "Median time of one step" in shell.run("%speedkit report --notes")
    row = shell.names["found"].to_dict()["variants"][0]
    assert row["memory"]["peak_bytes"] > row["memory"]["state_bytes"] > 0


NOTED = "handle = model[0].register_forward_hook(lambda *it: seen.put(it[2].dtype))"
PLAIN = "model(x).sum().backward()"
INSIDE = "with ctx.autocast():\n    model(x)"


@pytest.mark.parametrize("cell", [PLAIN, INSIDE], ids=["plain", "inside"])
@pytest.mark.parametrize("line", ["-n 1 -r 2", "--compare current --budget 0.2 -v found"])
def test_a_cell_as_it_stands_runs_in_the_plans_precision(shell, seen, cell, line):
    shell.run(f"{NOTED}\n%speedkit apply model --precision bf16")
    shell.run(f"%%speedbench {line}\n{cell}")
    assert {str(one) for one in seen()} == {"torch.bfloat16"}
    if "compare" in line:
        assert "precision" in shell.names["found"].records[0].applied
