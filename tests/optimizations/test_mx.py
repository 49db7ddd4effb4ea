"""mx: linear layers in microscaling formats, by torchao, where nothing is trained."""

from __future__ import annotations

import pytest
import torch
from compressed import (
    INPUTS,
    SMALL,
    assert_code_has,
    assert_declined,
    assert_no_rule_takes_it,
    each_form,
    needs_capability,
    network,
    real,
    trained_by,
    with_plan,
    with_torchao,
)

from speedkit_jupyter import Facts, SpeedConfig, plan
from speedkit_jupyter.optimizations import named
from speedkit_jupyter.optimizations.base.decision import Decision
from speedkit_jupyter.optimizations.base.target import Target

WORDS = ("mxfp8", "mxfp4")


@pytest.mark.parametrize("machine", ["cpu", "b200", "h200"])
def test_auto_never_takes_or_offers_it(hardware, machine):
    assert_no_rule_takes_it("mx", with_torchao(hardware(machine)))


@pytest.mark.parametrize(
    ("word", "value"), [(True, "mxfp8"), ("true", "mxfp8"), ("mxfp4", "mxfp4")]
)
def test_by_request_blackwell_has_it(hardware, word, value):
    decision = plan(SpeedConfig(mx=word), with_torchao(hardware("b200")), SMALL)["mx"]
    assert (decision.value, decision.active) == (value, True)


@pytest.mark.parametrize(
    ("machine", "facts", "why"),
    [
        ("h200", SMALL, "need compute capability 10.0"),
        ("cpu", Facts(linears=4, dtypes=("bfloat16",)), "this is cpu"),
        ("b200", trained_by("SGD"), "SGD trains this model"),
    ],
)
def test_it_is_declined_with_the_reason(hardware, machine, facts, why):
    assert_declined(SpeedConfig(mx=True), "mx", with_torchao(hardware(machine)), facts, why)


def test_a_float32_model_needs_autocast(hardware):
    machine = with_torchao(hardware("b200"))
    facts = Facts(device="cuda:0", linears=4)
    asked = SpeedConfig(mx=True, precision="fp32")
    assert "precision: bf16" in plan(asked, machine, facts)["mx"].reason
    assert plan(SpeedConfig(mx=True, precision="bf16"), machine, facts)["mx"].active


@real
@pytest.mark.parametrize("word", WORDS)
def test_weights_are_torchaos_and_come_back(word):
    model = network().bfloat16()
    weight, entry, on = model[0].weight, named("mx"), Decision("mx", word, "as asked", active=True)
    with entry.applied(on, Target(model)):
        assert entry.observe(Target(model)) == {"model.mx": "2 of 3 linear layers"}
        assert type(model[0].weight).__name__ == "MXTensor"
        off = model[0].weight.dequantize(torch.float32) - weight.float()
        assert off.norm() < 0.2 * weight.float().norm()
    assert model[0].weight is weight


@each_form
@pytest.mark.parametrize("word", WORDS)
def test_the_code_to_take_along_is_torchaos_call(form, word, hardware):
    assert_code_has(["quantize_("], SpeedConfig(mx=word), with_torchao(hardware("b200")), form)


@pytest.mark.gpu
@real
def test_on_a_gpu_it_is_near_the_model_and_comes_back():
    needs_capability(10, 0)
    model, inputs = network().cuda().bfloat16(), INPUTS.cuda().bfloat16()
    plain, found = with_plan(model, inputs, SpeedConfig(mx=True), "2 of 3 linear layers")
    assert (found - plain).norm() < 0.2 * plain.norm()
