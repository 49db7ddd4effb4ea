"""Tensors of every layout and kind are compared as far as they have values; none of them raises."""

from __future__ import annotations

import pytest
import torch
from planted import examined
from torch._subclasses import FakeTensorMode
from torch.masked import masked_tensor

from speedkit_jupyter.right.values import leaves
from speedkit_jupyter.torchglue.storage import plain

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch calls many of these a prototype
]


def jagged(x):
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, len(x)]))


WITH_VALUES = {
    "strided": lambda x: x,
    "coo": torch.Tensor.to_sparse,
    "coo, uncoalesced": lambda x: torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 1]]), torch.stack([x[0], x[1], x[2]]), (4, x.shape[1])
    ),
    "csr": torch.Tensor.to_sparse_csr,
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "mkldnn": torch.Tensor.to_mkldnn,
    "jagged": jagged,
    "nested": lambda x: torch.nested.nested_tensor([x[:1], x[1:]]),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "masked": lambda x: masked_tensor(x, x > 0),
    "conjugate": lambda x: x.to(torch.complex64).conj(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
}
WITHOUT_VALUES = {
    "meta": lambda x: x.to("meta"),
    "fake": lambda x: FakeTensorMode().from_tensor(x),
}
ALL = {**WITH_VALUES, **WITHOUT_VALUES}


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(4, 6)


@pytest.mark.parametrize("name", WITH_VALUES)
def test_values_of_every_layout_are_compared(name, x):
    (values,), (others,) = (leaves(WITH_VALUES[name](one)).values() for one in (x, 2 * x))
    assert float(values.abs().sum()) > 0
    assert bool((others != values).any())


@pytest.mark.parametrize("name", WITHOUT_VALUES)
def test_what_has_no_values_is_named(name, x):
    one = WITHOUT_VALUES[name](x)
    assert plain(one) is None
    (found,) = leaves(one).values()
    assert isinstance(found, str)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", ALL)
def test_a_step_that_returns_one_is_measured(name, x):
    model = torch.nn.Linear(6, 6)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        given = model(x)
        given.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return ALL[name](given.detach())

    for record in examined(step, ["fused_optimizer"], model, optimizer).records:
        assert record.failure is None, record.failure
        assert record.accuracy.verdict in ("exact", "rounding"), record.accuracy
