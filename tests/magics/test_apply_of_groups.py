"""A step of several models: the next steps that its report prints work as they are printed."""

from __future__ import annotations

import re

import pytest
from torch import nn

pytestmark = pytest.mark.usefixtures("trusted")

MODELS = """
import torch
encoder, decoder = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
parts = {'encoder': encoder, 'decoder': decoder}
both = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], 0.1)
inputs = torch.randn(4, 8)
"""
FASTER = "sleep(0.01 if both.param_groups[0]['fused'] else 0.05)"
STEP = "decoder(encoder(inputs)).pow(2).mean().backward(); both.step(); both.zero_grad()"


@pytest.fixture
def notebook(shell, made_time):
    """One that has a model and an optimizer already, and gets two more."""
    shell.names["sleep"] = made_time.sleep
    shell.run(MODELS)
    return shell


def tuned(notebook, step=f"{FASTER}; {STEP}"):
    shown = notebook.run(f"%%speedbench --tune --budget 9 -v tuning\n{step}")
    assert notebook.names["tuning"].helped
    return shown


def measured(notebook, name):
    """By the learned plan; the optimizer of both may be as it should be by the other's."""
    return notebook.names[name].plan["fused_optimizer"].source == "measured"


def test_the_printed_next_steps_put_the_plan_in_force_on_all_of_its_models(notebook):
    shown = tuned(notebook)
    lines = re.findall(r"^ *(%speedkit [^#\n]*?) +#", shown, re.M)
    assert lines == [
        "%speedkit apply encoder,decoder", "%speedkit verify", "%speedkit code encoder",
    ]  # fmt: skip
    shown = notebook.run(lines[0])
    assert "Applied to encoder" in shown
    assert "Applied to decoder" in shown
    assert measured(notebook, "ctx")
    assert measured(notebook, "ctx_decoder")
    assert "= True" in notebook.run(lines[2])
    notebook.run("%speedkit restore")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "line",
    [
        "decoder,encoder",
        "encoder,decoder --optimizer both",
        "parts['encoder'],parts['decoder']",
        "encoder,parts['decoder']",
    ],
)
def test_they_may_be_named_in_any_order_and_way(notebook, line):
    tuned(notebook)
    notebook.run(f"%speedkit apply {line}")
    contexts = [value for name, value in notebook.names.items() if name.startswith("ctx")]
    assert len(contexts) == 2
    assert all(context.plan["fused_optimizer"].source == "measured" for context in contexts)
    notebook.run("%speedkit restore")


def test_where_the_search_could_not_tell_apply_says_that_nothing_is_applied():
    from speedkit_jupyter.measure.subject.from_function import step_of
    from speedkit_jupyter.tuning.outcome import Tuning

    model = nn.Linear(2, 2)
    step = step_of(lambda: model.weight, model)
    found = Tuning(step, unclear="too noisy")
    with pytest.warns(UserWarning, match="could not tell, so nothing is applied$"):
        assert found.apply() == []
