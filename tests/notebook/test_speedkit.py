"""Run %speedkit and its subcommands, as a user types them."""

from pathlib import Path

import pytest
import torch
from IPython.core.error import UsageError

from speedkit_jupyter.catalog import CATALOG


def test_without_a_model_status_says_what_to_do_and_the_catalog_lists_all(loaded_shell):
    assert "Define one, then `%speedkit apply model`" in loaded_shell.run("%speedkit")
    shown = loaded_shell.run("%speedkit catalog")
    assert "for a float32 model" in shown
    for optimization in CATALOG:
        assert optimization.name in shown


def test_models_in_a_dict_are_seen_from_the_first_look_on(loaded_shell):
    loaded_shell.run("import torch\nmodels = {'tf': torch.nn.Linear(2, 2)}")
    for line in ("", "report", "panel"):
        assert "models['tf']" in loaded_shell.run(f"%speedkit {line}")
    assert "It is a value of 'precision'" in str(loaded_shell.fails("%speedkit explain bf16"))


def test_a_cell_may_call_a_frozen_module(loaded_shell):
    loaded_shell.run("import torch\nfrozen = torch.nn.Linear(2, 2).eval()")
    loaded_shell.run("frozen, x = torch.jit.freeze(torch.jit.script(frozen)), torch.rand(1, 2)")
    shown = loaded_shell.run("%%speedbench --compare baseline,threads:1 --budget 0.1\nfrozen(x)")
    assert "threads:1" in shown


@pytest.mark.smoke
def test_apply_puts_the_context_into_the_namespace_and_says_that_nothing_is_to_edit(shell):
    shown = shell.run("%speedkit apply model --optimizer optimizer --precision bf16")
    assert shell.names["ctx"].active
    assert "Nothing to edit" in shown
    assert "Before and after" in shown
    assert shell.names["optimizer"].param_groups[0]["fused"] is True


def test_status_says_that_an_autocast_of_the_users_own_stays(shell):
    shell.run("%speedkit apply model --precision bf16")
    assert "its own autocast" not in shell.run("%speedkit")
    shell.run("with ctx.autocast(): model(x)")
    assert "its own autocast" not in shell.run("%speedkit")
    shell.run("%speedkit apply model --precision bf16")
    shell.run("with torch.autocast('cpu'): model(x)")
    shown = shell.run("%speedkit status")
    assert "its own autocast; forward passes outside of the plan: 1" in shown


@pytest.mark.smoke
def test_report_holds_reasons_and_changes(shell):
    shell.run("%speedkit apply model --sdpa math")
    shown = " ".join(shell.run("%speedkit report").split())
    assert "sdpa ● on math you as asked" in shown
    assert "sdp.flash true false" in shown


def test_code_as_yaml_is_a_config_that_gives_just_this_plan(shell, tmp_path: Path):
    file = tmp_path / "plan.yaml"
    shell.run("%speedkit apply model --sdpa math --channels_last false")
    before = shell.names["ctx"].plan.active_values()
    shell.run(f"%speedkit code --as yaml --save '{file}'\n%speedkit restore")
    shell.run(f"%speedkit apply model --config '{file}'")
    assert shell.names["ctx"].plan.active_values() == before
    assert shell.names["ctx"].config.is_alone


def test_code_is_saved_and_never_written_over_unasked(shell, tmp_path: Path):
    file = tmp_path / "fast.py"
    assert "Saved to" in shell.run(f"%speedkit code --save '{file}'")
    compile(file.read_text(), str(file), "exec")
    file.write_text("mine")
    error = shell.fails(f"%speedkit code --save '{file}'")
    assert isinstance(error, UsageError)
    assert "--force" in str(error)
    assert file.read_text() == "mine"
    shell.run(f"%speedkit code --save '{file}' --force")
    assert "torch.optim" in file.read_text()


def test_restore_names_a_flag_that_the_user_changed_meanwhile(shell, two_threads):
    shell.run("%speedkit apply model --threads 1")
    torch.set_num_threads(2)
    assert "num_threads: you changed it meanwhile" in shell.run("%speedkit restore")


@pytest.mark.smoke
def test_unload_restores_everything_and_takes_the_magics_away(shell):
    shell.run("%speedkit apply model --sdpa math")
    shell.ip.run_line_magic("unload_ext", "speedkit_jupyter")
    assert torch.backends.cuda.flash_sdp_enabled()
    assert shell.names["optimizer"].param_groups[0]["fused"] is None
    assert "speedkit" not in shell.ip.magics_manager.magics["line"]
    assert "speedbench" not in shell.ip.magics_manager.magics["cell"]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%speedkit ap", "apply"),
        ("%speedkit apply mo", "model"),
        ("%speedkit apply model --prec", "--precision"),
        ("%speedkit apply model --precision b", "bf16"),
        ("%speedkit apply model --compile-mode max", "max-autotune"),
        ("%speedkit apply model --optimizer opt", "optimizer"),
        ("%speedkit code --as tran", "transformers"),
        ("%speedkit tuned for", "forget"),
        ("%%speedbench --compare ba", "baseline"),
        ("%%speedbench --compare baseline,bf", "bf16"),
    ],
)
def test_tab_completes(shell, line, expected):
    _, matches = shell.ip.complete(None, line, len(line))
    assert any(match.endswith(expected) for match in matches), matches


@pytest.mark.parametrize(
    ("line", "first"),
    [("%%speedbench --", "--compare"), ("%%speedbench --t", "--tune"), ("%speedkit a", "apply"),
     ("%speedkit apply --", "--optimizer"), ("for x in y:\n    %speedkit apply mod", "model")],
)  # fmt: skip
def test_tab_offers_our_words_first_and_alone(shell, line, first):
    """Complete as a front end does, with Jedi's names, which must not hide the options."""
    from IPython.core import completer

    if not hasattr(completer, "context_matcher"):
        pytest.skip("this IPython has no matchers")
    with completer.provisionalcompleter():
        found = [one.text for one in shell.ip.Completer.completions(line, len(line))]
    assert found[0] == first
    if "--" in line:
        assert all(one.startswith("--") for one in found)


def test_explain_looks_at_every_model(shell):
    shown = " ".join(shell.run("other = nn.Linear(2, 2)\n%speedkit explain channels_last").split())
    assert "`other` as is: false; the model has no 2-D or 3-D convolution" in shown
    assert "`model` as is" in shown or "`model` on" in shown


@pytest.mark.parametrize("optimization", CATALOG, ids=lambda entry: entry.name)
def test_explain_says_what_helps_what_is_at_risk_and_how_it_goes_back(shell, optimization):
    shown = " ".join(shell.run(f"%speedkit explain {optimization.name}").split())
    for sentence in (optimization.helps, optimization.risk):
        assert sentence in shown
    assert optimization.page in shown


LATE = """\
del optimizer
%speedkit apply model
opt = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.2)
loss_fn(model(x), y).backward(); opt.step(); opt.zero_grad()"""
LINE = "optimizer = torch.optim.AdamW(model.parameters(), lr=0.0003, weight_decay=0.2, fused=True)"


@pytest.mark.parametrize("line", ["", " --optimizer opt"])
def test_an_optimizer_that_the_plan_met_later_is_in_its_code(shell, line):
    shell.run(LATE)
    shown = shell.run(f"%speedkit code{line}")
    assert LINE in " ".join(shown.replace("(\n    ", "(").replace(",\n)", ")").split())
    assert "made later" not in shown
    shell.run("%speedkit restore")
    assert shell.names["opt"].param_groups[0]["fused"] is None
