"""An optimizer is held to what its gradients say, and to nothing where they say nothing."""

from __future__ import annotations

import pytest
import torch

from speedkit_jupyter.measure.checks.comparing.updates import misstep
from speedkit_jupyter.measure.checks.observing.observation import Observation

SIZE = 64


def adams(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Adam's step after so many gradients."""
    parameter = torch.zeros_like(gradients[0], requires_grad=True)
    optimizer = torch.optim.Adam([parameter], 1e-3)
    for gradient in gradients:
        before = parameter.detach().clone()
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach() - before


def course(weights: list[torch.Tensor], biases: list[torch.Tensor]) -> list[Observation]:
    """Of a weight and a bias, with Adam."""
    stretches = []
    for count in range(1, len(weights) + 1):
        updates = [adams(weights[:count]), adams(biases[:count])]
        moved = sum(float(update.norm()) for update in updates)
        gradients = [weights[count - 1], biases[count - 1]]
        stretches.append(Observation(gradients=gradients, updates=updates, moved=moved))
    return stretches


def drawn(count: int, size: float) -> list[torch.Tensor]:
    return [size * torch.randn(SIZE, dtype=torch.float64) for _ in range(count)]


def nearly(gradients: list[torch.Tensor], share: float) -> list[torch.Tensor]:
    return [gradient * (1 + share * torch.randn_like(gradient)) for gradient in gradients]


def found(mine: list[Observation], theirs: list[Observation], exact: list[Observation]) -> str:
    *before, last = zip(mine, theirs, strict=True)
    return misstep(*last, before=before, reference=exact[-1])


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("is_known", [True, False])
def test_steps_that_noise_leads_are_not_accused(share, is_known):
    for seed in range(20):
        torch.manual_seed(seed)
        weights, noise = drawn(3, 1.0), drawn(3, 1e-9)
        theirs, mine = course(weights, noise), course(weights, nearly(noise, share))
        exact = course(weights, drawn(3, 1e-18)) if is_known else theirs
        assert not found(mine, theirs, exact)


@pytest.mark.parametrize("spoil", [lambda way: way * 0, lambda way: way * 0.8, lambda way: -way])
def test_a_small_gradient_that_is_no_noise_leads(spoil):
    torch.manual_seed(0)
    weights, biases = drawn(1, 1.0), drawn(1, 1e-6)
    theirs, mine = course(weights, biases), course(weights, nearly(biases, 1e-4))
    assert not found(mine, theirs, theirs)
    mine[-1].updates[1] = spoil(mine[-1].updates[1])
    assert found(mine, theirs, theirs)


def test_noise_that_is_the_same_bit_for_bit_leads_alike():
    torch.manual_seed(0)
    weights, noise, zeros = drawn(1, 1.0), drawn(1, 1e-9), drawn(1, 1e-18)
    theirs, mine = course(weights, noise), course(weights, noise)
    mine[-1].updates[1] = -mine[-1].updates[1]
    assert found(mine, theirs, course(weights, zeros))
