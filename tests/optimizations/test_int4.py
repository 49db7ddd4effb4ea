"""int4: linear layers with weights of 4 bits, by torchao, where nothing is trained."""

from __future__ import annotations

import pytest
import torch
from compressed import (
    SMALL,
    assert_code_has,
    assert_declined,
    assert_no_rule_takes_it,
    each_form,
    needs_capability,
    real,
    trained_by,
    with_plan,
    with_torchao,
)
from torch import nn

from speedkit_jupyter import Facts, SpeedConfig, plan
from speedkit_jupyter.optimizations import named
from speedkit_jupyter.optimizations.base.decision import Decision
from speedkit_jupyter.optimizations.base.target import Target


@pytest.mark.parametrize("machine", ["cpu", "h200", "t4", "mi300x"])
def test_auto_never_takes_or_offers_it(hardware, machine):
    assert_no_rule_takes_it("int4", with_torchao(hardware(machine)))


@pytest.mark.parametrize("machine", ["a100", "h200", "rtx4050_laptop_windows"])
def test_by_request_gpus_with_bf16_tensor_cores_have_it(hardware, machine):
    assert plan(SpeedConfig(int4=True), with_torchao(hardware(machine)), SMALL)["int4"].active


@pytest.mark.parametrize(
    ("machine", "facts", "why"),
    [
        ("t4", SMALL, "need compute capability 8.0; Tesla T4 has 7.5"),
        ("mi300x", SMALL, "this is AMD Instinct MI300X"),
        ("cpu", Facts(linears=4), "this is cpu"),
        ("h200", Facts(device="cuda:0", convolutions=1), "no linear layer"),
        ("h200", trained_by("SGD"), "SGD trains this model"),
    ],
)
def test_it_is_declined_with_the_reason(hardware, machine, facts, why):
    assert_declined(SpeedConfig(int4=True), "int4", with_torchao(hardware(machine)), facts, why)


def test_one_of_them_has_the_weights(hardware):
    asked = SpeedConfig(int8="weights", int4=True, float8=True)
    found = plan(asked, with_torchao(hardware("h200")), SMALL)
    assert [found[name].active for name in ("int8", "int4", "float8")] == [True, False, False]
    assert "int8 has taken the weights' place already" in found["int4"].reason


@real
def test_rows_that_are_no_whole_groups_multiply_as_before():
    model = nn.Sequential(nn.Linear(100, 64), nn.Linear(64, 2))
    entry, on = named("int4"), Decision("int4", True, "as asked", active=True)
    with entry.applied(on, Target(model)):
        assert entry.observe(Target(model)) == {"model.int4": "0 of 2 linear layers"}
        assert {type(p) for p in model.parameters()} == {nn.Parameter}


@each_form
def test_the_code_to_take_along_is_torchaos_call(form, hardware):
    assert_code_has(["quantize_("], SpeedConfig(int4=True), with_torchao(hardware("a100")), form)


@pytest.mark.gpu
@real
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_it_is_near_the_model_and_comes_back(dtype):
    needs_capability(8, 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 60)).cuda().to(dtype)
    inputs = torch.randn(3, 256, device="cuda", dtype=dtype)
    plain, found = with_plan(model, inputs, SpeedConfig(int4=True), "2 of 2 linear layers")
    assert not torch.equal(found, plain)
    assert (found - plain).norm() < 0.2 * plain.norm()
