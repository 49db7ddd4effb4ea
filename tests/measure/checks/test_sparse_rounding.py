"""Controls round sparse tensors too: a step with them is judged by what bf16 does to it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from speedkit_jupyter.measure.checks.rounding import rounded

torch.manual_seed(0)
TOKENS = torch.randint(0, 50, (8, 4))
ADJACENT = (torch.rand(8, 8) < 0.4).double()


def looked_up(weight):
    return functional.embedding(TOKENS, weight, sparse=True).sum(1)


STEPS = {
    "embedding": looked_up,
    "embedding bag": lambda weight: functional.embedding_bag(
        TOKENS, weight, mode="sum", sparse=True
    ),
    "twice": lambda weight: looked_up(weight) + looked_up(weight * 1),
    "coo": lambda weight: torch.sparse.mm(ADJACENT.to_sparse(), looked_up(weight)),
    "csr": lambda weight: torch.sparse.mm(ADJACENT.to_sparse_csr(), looked_up(weight)),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", STEPS)
def test_a_control_rounds_what_leads_to_a_sparse_gradient(name):
    torch.manual_seed(0)
    weight = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    onto = torch.randn(16, 3, dtype=torch.float64)

    def gradient():
        weight.grad = None
        (STEPS[name](weight) @ onto).square().sum().backward()
        return weight.grad.to_dense().clone()

    exact = gradient()
    with rounded("bf16"):
        found = gradient()
    off = float((found - exact).norm() / exact.norm())
    assert 1e-4 < off < 0.1
