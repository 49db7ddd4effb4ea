"""Only what really drew inside of a kernel is said to have; dropout elsewhere is checked."""

from __future__ import annotations

import pytest
import torch
from planted import examined, word
from torch import nn
from torch.nn import functional

from speedkit_jupyter.measure.checks.reference import draws_inside, replayed

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE = (2, 4, 8, 8)


@torch.library.custom_op(
    "speedkit_tests::attention", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def attention(x: torch.Tensor, dropout_p: float = 0.0) -> torch.Tensor:
    """A kernel of its own, which may draw."""
    return x.clone()


def of_torch(x):
    return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def with_mask(x):
    return functional.scaled_dot_product_attention(x, x, x, torch.ones(8, 8).tril().bool())


def recurrent(x):
    return nn.LSTM(8, 8, 2)(x[0])


@pytest.mark.parametrize("elsewhere", [False, True], ids=["alone", "beside dropout"])
@pytest.mark.parametrize("kernel", [of_torch, with_mask, recurrent, attention])
def test_a_kernel_that_could_draw_and_does_not_is_not_named(kernel, elsewhere):
    x = torch.randn(SIZE)
    drawn = set()
    with replayed(drawn):
        kernel(functional.dropout(x, 0.5) if elsewhere else x)
    assert not any(map(draws_inside, drawn))


def test_a_kernel_that_was_asked_for_dropout_is_named():
    drawn = set()
    with replayed(drawn):
        attention(torch.randn(SIZE), dropout_p=0.1)
    assert drawn == {"attention"}


class Attending(nn.Module):
    """(N, T, 8) to (N, T, 8), with dropout behind an attention that has none."""

    def __init__(self, kernel, drops):
        super().__init__()
        self.kernel, self.drops, self.out = kernel, drops, nn.Linear(8, 8)

    def forward(self, x):
        found = self.kernel(x[:, None])[:, 0]
        return self.out(functional.dropout(found, 0.1) if self.drops() else found)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("plan", ["fused_optimizer", "threads:2", "bf16"])
@pytest.mark.parametrize("kernel", [of_torch, with_mask, attention])
@pytest.mark.parametrize("wrong", [False, True], ids=["kept", "left out"])
def test_dropout_that_a_variant_leaves_out_beside_an_attention_is_wrong(kernel, plan, wrong):
    torch.manual_seed(0)

    def in_force():
        fused = optimizer.param_groups[0].get("fused")
        return fused or torch.is_autocast_enabled("cpu") or torch.get_num_threads() == 2

    model, x = Attending(kernel, lambda: not (wrong and in_force())), torch.randn(16, 8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = examined(step, [plan], model, optimizer).records[1]
    assert word(found) in (("wrong",) if wrong else ("exact", "rounding")), found.accuracy
