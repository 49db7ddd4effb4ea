"""Lines that were accepted in silence, or answered by what is no answer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter import StepError, benchmark, tune, verify

STEP = "loss = loss_fn(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()"


@pytest.mark.parametrize("name", ["baseline", "current", "auto"])
@pytest.mark.parametrize("joined", ["{0}+{0}", "bf16+{0}", "{0}+bf16"])
def test_a_whole_plan_is_joined_to_nothing(shell, name, joined):
    line = f"%%speedbench --compare baseline,{joined.format(name)}\n{STEP}"
    assert f"{name} is a whole plan" in str(shell.fails(line))


def test_a_result_is_not_saved_without_a_name(shell):
    assert "--save ''" in str(shell.fails(f"%%speedbench --save '' -n 1 -r 1\n{STEP}"))


@pytest.mark.parametrize("name", ["__import__", "print", "class", "1a", "''"])
def test_a_name_of_pythons_own_is_given_to_nothing(shell, name):
    bare = name.strip("'")
    assert bare in str(shell.fails(f"%speedkit apply model --ctx {name}"))
    assert bare in str(shell.fails(f"%%speedbench -v {name} -n 1 -r 1\n{STEP}"))


@pytest.mark.parametrize("magic", ["%time", "%timeit -n1 -r1", "%prun -q"])
def test_a_magic_in_a_measured_cell_is_said_not_to_be_looked_into(shell, magic):
    shell.run(f"def train():\n    {STEP}")
    error = str(shell.fails(f"%%speedbench --compare baseline,bf16\n{magic} train()"))
    assert f"what stands behind {magic.split()[0]} is not looked into" in error


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantized_model_is_said_to_have_no_parameters(shell):
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    quantized = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
    x = torch.rand(2, 4)
    for function in (benchmark, tune, verify):
        with pytest.raises(StepError, match="its weights are quantized"):
            function(lambda: quantized(x))
    shell.names["quantized"] = quantized
    error = shell.fails("%%speedbench --compare baseline,bf16\nquantized(x)")
    assert "its weights are quantized" in str(error)


def test_verify_says_where_a_model_lies_that_has_no_name(shell):
    shell.run(
        "class Holder: pass\n"
        "holder = Holder(); holder.net = nn.Linear(4, 2); model = nn.Linear(4, 4)\n"
        "def train():\n    holder.net(model(torch.rand(3, 4))).sum().backward()"
    )
    shown = " ".join(shell.run("%speedkit verify --step train --plan bf16 --steps 2").split())
    assert "`model` and `holder.net` in `train`" in shown or (
        "`holder.net` and `model` in `train`" in shown
    )
