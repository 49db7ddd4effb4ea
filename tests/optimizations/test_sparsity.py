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

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, plan
from speedkit_jupyter.optimizations import sparsity

each = pytest.mark.parametrize("value", [True, "prune"])


def sparse_network() -> nn.Module:
    """The network with its second layer 2:4 sparse."""
    model = network().bfloat16()
    with torch.no_grad():
        model[2].weight.copy_(sparsity.pruned(model[2].weight))
    return model


@pytest.mark.parametrize("machine", ["cpu", "a100", "t4", "mi300x"])
def test_auto_never_takes_or_offers_it(hardware, machine):
    assert_no_rule_takes_it("sparsity", hardware(machine))


@each
def test_by_request_ampere_and_later_have_it_without_another_library(hardware, value):
    bare = hardware("a100").model_copy(update={"libraries": {}})
    decision = plan(SpeedConfig(sparsity=value), bare, SMALL)["sparsity"]
    assert (decision.value, decision.active) == (value, True)


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
def test_it_is_declined_with_the_reason(hardware, machine, facts, why):
    assert_declined(SpeedConfig(sparsity="prune"), "sparsity", hardware(machine), facts, why)


def test_pruned_weights_keep_the_two_larger_of_each_four():
    weight = torch.tensor([[3.0, -1.0, 2.0, -4.0], [0.0, float("nan"), 1.0, float("inf")]])
    found = sparsity.pruned(weight)
    assert found[0].tolist() == [3.0, 0.0, 0.0, -4.0]
    assert found[1, 1].isnan()
    assert found[1, 3].isinf()
    assert sparsity.is_sparse(found)
    assert not sparsity.is_sparse(weight)


def test_the_weights_that_fit_are_replaced_and_come_back(monkeypatch):
    """On this machine, which has no such kernels: by dense weights of the same zeros."""
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", torch.clone)
    monkeypatch.setattr(sparsity.Sparsity, "missing_units", lambda *given: "")
    inputs = INPUTS.bfloat16()
    plain, found = with_plan(sparse_network(), inputs, SpeedConfig(sparsity=True), "1 of 3")
    assert torch.equal(found, plain)
    plain, found = with_plan(sparse_network(), inputs, SpeedConfig(sparsity="prune"), "2 of 3")
    assert not torch.equal(found, plain)
    model = network()
    with apply_speedups(model, SpeedConfig(sparsity=True).alone())[1] as context:
        assert "two zeros in each four" in context.notes["sparsity"]


@pytest.mark.gpu
@each
def test_on_a_gpu_it_computes_with_the_weights_that_are_left(value):
    needs_capability(8, 0)
    model, inputs = sparse_network().cuda(), INPUTS.cuda().bfloat16()
    plain, found = with_plan(model, inputs, SpeedConfig(sparsity=value))
    assert value == "prune" or torch.allclose(found, plain, atol=1e-2)


@each
@each_form
def test_the_code_to_take_along_is_torchs_call(form, value, hardware):
    config = SpeedConfig(sparsity=value)
    assert_code_has(["to_sparse_semi_structured("], config, hardware("a100"), form)
