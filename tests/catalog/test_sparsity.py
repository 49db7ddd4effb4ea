"""sparsity: linear layers by weights with two zeros in each four, where nothing is trained."""

from __future__ import annotations

import pytest
import torch
from compressed import INPUTS, needs_capability, network, with_plan
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups
from speedkit_jupyter.catalog import sparsity

each = pytest.mark.parametrize("value", [True, "prune"])


def sparse_network() -> nn.Module:
    """The network with its second layer 2:4 sparse."""
    model = network().bfloat16()
    with torch.no_grad():
        model[2].weight.copy_(sparsity.pruned(model[2].weight))
    return model


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
