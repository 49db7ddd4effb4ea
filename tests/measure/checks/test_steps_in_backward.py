"""Optimizers that step within the backward pass: rounding is not accused, a fault is."""

from __future__ import annotations

import pytest
import torch
from planted import examined

pytestmark = pytest.mark.usefixtures("one_thread")


def in_force():
    return not torch.backends.cuda.flash_sdp_enabled()


def judged(seed, spoil=None):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8)
    )
    x, y = torch.randn(64, 32), torch.randint(0, 8, (64,))
    optimizers = {one: torch.optim.Adam([one], 1e-3, foreach=False) for one in model.parameters()}

    def hook(one):
        if spoil is not None and in_force() and one is model[0].weight:
            spoil(one)
        optimizers[one].step()
        optimizers[one].zero_grad()

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(hook)

    def step():
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return examined(step, ["bf16+sdpa:math"], model, list(optimizers.values())).records[1].accuracy


@pytest.mark.parametrize("seed", [0, 1])
def test_a_sign_that_rounding_turns_is_not_accused(seed):
    found = judged(seed)
    assert found.verdict == "rounding", found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "spoil", [lambda one: one.grad.zero_(), lambda one: one.grad.neg_()], ids=["stays", "turns"]
)
def test_a_parameter_that_goes_elsewhere_is_seen(spoil):
    found = judged(0, spoil)
    assert found.verdict == "wrong", found
