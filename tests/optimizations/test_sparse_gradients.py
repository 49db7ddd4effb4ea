"""Sparse gradients are a matter of the optimizer that gets them, not of the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups, code
from speedkit_jupyter.optimizations.facts.model import Facts

FUSED = SpeedConfig(fused_optimizer=True).alone()
MODULES = {
    "embedding": lambda: nn.Embedding(9, 4, sparse=True),
    "bag": lambda: nn.EmbeddingBag(9, 4, sparse=True),
    "inside": lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True)),
}


def parts(kind="embedding"):
    model = nn.Sequential(MODULES[kind](), nn.Linear(4, 2))
    sparse = torch.optim.SparseAdam(list(model[0].parameters()))
    return model, sparse, torch.optim.AdamW(model[1].parameters())


def train(model, *optimizers):
    model(torch.randint(9, (3, 2))).square().mean().backward()
    for one in optimizers:
        one.step()
        one.zero_grad()


@pytest.mark.parametrize("kind", MODULES)
def test_an_optimizer_of_dense_parameters_is_fused_beside_one_of_sparse_ones(kind):
    model, sparse, dense = parts(kind)
    with apply_speedups(model, FUSED, optimizer=[sparse, dense])[1] as context:
        assert dense.param_groups[0]["fused"] is True
        assert "SparseAdam" in context.plan["fused_optimizer"].reason
        train(model, sparse, dense)
        assert 'group["fused"] = True' in code(context)
    assert dense.param_groups[0]["fused"] is None


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad])
def test_one_that_holds_a_parameter_with_sparse_gradients_is_declined(make):
    model, _, dense = parts()
    whole = make(model.parameters(), 0.1)
    with apply_speedups(model, FUSED, optimizer=[whole, dense])[1] as context:
        assert whole.param_groups[0]["fused"] is None
        assert dense.param_groups[0]["fused"] is True
        assert f"{make.__name__}: fused kernels take no sparse gradients" in (
            context.plan["fused_optimizer"].reason
        )
        train(model, whole)


def test_one_that_is_made_later_is_judged_by_what_it_holds():
    model, _, _ = parts()
    with apply_speedups(model, FUSED)[1]:
        sparse = torch.optim.SGD(model[0].parameters(), 0.1)
        dense = torch.optim.AdamW(model[1].parameters())
        train(model, sparse, dense)
        assert sparse.param_groups[0]["fused"] is None
        assert dense.param_groups[0]["fused"] is True


def test_a_gradient_that_is_sparse_already_is_seen_without_a_module_that_says_it():
    weight = nn.Parameter(torch.rand(9, 4))
    nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
    model = nn.ParameterDict({"weight": weight})
    assert Facts.read(model, [torch.optim.SGD([weight], 0.1)]).optimizers[0].sparse_gradients
