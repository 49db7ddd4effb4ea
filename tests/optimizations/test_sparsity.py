"""sparsity: linear layers by weights with two zeros in each four, where nothing is trained."""

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
    trained_by,
    with_plan,
)
from torch import nn

from speedkit_jupyter import ConfigError, Facts, SpeedConfig, apply_speedups, plan
from speedkit_jupyter.optimizations import named, sparsity
from speedkit_jupyter.optimizations.base.decision import Effect

WORDS = (True, "prune")
each = pytest.mark.parametrize("value", WORDS)


def sparse_network() -> nn.Module:
    """The network with its second layer 2:4 sparse."""
    model = network().bfloat16()
    with torch.no_grad():
        model[2].weight.copy_(sparsity.pruned(model[2].weight))
    return model


@pytest.mark.parametrize("machine", ["cpu", "a100", "b200", "t4", "mi300x"])
def test_auto_never_takes_or_offers_it(hardware, machine):
    assert_no_rule_takes_it("sparsity", hardware(machine))


@each
def test_by_request_ampere_and_later_have_it_without_another_library(hardware, value):
    bare = hardware("a100").model_copy(update={"libraries": {}})
    decision = plan(SpeedConfig(sparsity=value), bare, SMALL)["sparsity"]
    assert (decision.value, decision.active) == (value, True)


def test_weights_that_are_sparse_already_make_no_other_model(hardware):
    effects = {}
    for value in WORDS:
        found = plan(SpeedConfig(sparsity=value), hardware("a100"), SMALL)
        effects[value] = named("sparsity").effect_of(found["sparsity"], SMALL)
        assert ("sparsity" in found.changes_model()) == (value == "prune")
    assert effects == {True: Effect.ROUNDING, "prune": Effect.CHANGES_MODEL}


def test_a_wrong_word_is_told():
    with pytest.raises(ConfigError, match="allowed: auto, true, false, prune"):
        SpeedConfig(sparsity="half")


@each
@pytest.mark.parametrize(
    ("machine", "facts", "why"),
    [
        ("t4", SMALL, "need compute capability 8.0; Tesla T4 has 7.5"),
        ("mi300x", SMALL, "this is AMD Instinct MI300X"),
        ("rtx4050_laptop_windows", SMALL, "no kernels for it on Windows"),
        ("a100", Facts(device="cuda:0", linears=4), "model.bfloat16()"),
        ("a100", trained_by("SGD"), "SGD trains this model"),
    ],
)
def test_it_is_declined_with_the_reason(hardware, value, machine, facts, why):
    assert_declined(SpeedConfig(sparsity=value), "sparsity", hardware(machine), facts, why)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pruned_weights_keep_the_two_larger_of_each_four(dtype):
    torch.manual_seed(0)
    weight = torch.randn(32, 64).to(dtype)
    found = sparsity.pruned(weight)
    kept = found != 0
    assert sparsity.is_sparse(found)
    assert not sparsity.is_sparse(weight)
    assert torch.equal(found[kept], weight[kept])
    groups, chosen = weight.abs().view(-1, 4), kept.view(-1, 4)
    for sizes, mask in zip(groups.tolist(), chosen.tolist(), strict=True):
        left_out = [size for size, keeps in zip(sizes, mask, strict=True) if not keeps]
        assert sorted(sizes)[:2] == sorted(left_out)


def test_what_is_not_a_number_is_not_left_out():
    weight = torch.ones(16, 16)
    weight[3, 5], weight[4, 4] = float("nan"), float("inf")
    found = sparsity.pruned(weight)
    assert found[3, 5].isnan()
    assert found[4, 4].isinf()


def test_the_weights_that_fit_are_replaced_and_come_back(monkeypatch):
    """Where this machine has no such kernels: by dense weights of the same zeros."""
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", torch.clone)
    monkeypatch.setattr(sparsity.Sparsity, "missing_units", lambda *given: "")
    inputs = INPUTS.bfloat16()
    plain, found = with_plan(sparse_network(), inputs, SpeedConfig(sparsity=True), "1 of 3")
    assert torch.equal(found, plain)
    plain, found = with_plan(sparse_network(), inputs, SpeedConfig(sparsity="prune"), "2 of 3")
    assert not torch.equal(found, plain)
    model = network()
    with apply_speedups(model, SpeedConfig(sparsity=True).alone())[1] as context:
        assert "no linear layer has a weight" in context.notes["sparsity"]


@each
@each_form
def test_the_code_to_take_along_is_torchs_call(form, value, hardware):
    config = SpeedConfig(sparsity=value)
    assert_code_has(["to_sparse_semi_structured("], config, hardware("a100"), form)


@pytest.mark.gpu
@each
def test_on_a_gpu_it_computes_with_the_weights_that_are_left(value):
    needs_capability(8, 0)
    model, inputs = sparse_network().cuda(), INPUTS.cuda().bfloat16()
    plain, found = with_plan(model, inputs, SpeedConfig(sparsity=value))
    assert value == "prune" or torch.allclose(found, plain, atol=1e-2)
