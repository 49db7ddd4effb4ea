"""`advise()` as a whole: the profile, what is watched, and the rules."""

from __future__ import annotations

import pytest
import torch
from made_time import MadeTime, install
from torch import nn
from torch.nn import functional as F

from speedkit_jupyter import advise
from speedkit_jupyter.advice.advice import Gain, Opportunity, ranked


@pytest.mark.slow
@pytest.mark.real_time
def test_modules_are_found_whatever_the_user_calls_the_model():
    """Their shares are looked up by the names that the profile has for them."""
    body = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    classifier = nn.Sequential(body, nn.Linear(512, 4))
    optimizer = torch.optim.SGD(classifier[1].parameters(), lr=0.1)
    x, y = torch.randn(64, 64), torch.randint(4, (64,))

    def step() -> None:
        F.cross_entropy(classifier(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = advise(step, budget_s=3)
    assert found.profile.costs is not None, found.profile.why_no_costs
    assert "frozen_gradients" in {one.rule for one in found.opportunities}


@pytest.mark.parametrize(
    ("share", "high"), [(0.06, 1 / 0.94), (0.12, 1 / 0.88), (1.0, 7.0), (0.02, 1 / 0.98)]
)
def test_no_range_exceeds_what_the_share_of_the_step_allows(share, high):
    one = Opportunity("title", "evidence", Gain(1.2, 7.0), "remedy", share=share)
    found = ranked([one], frozenset())
    assert [each.gain.high for each in found] == ([pytest.approx(high)] if high > 1.03 else [])
    assert all(each.gain.low <= each.gain.high for each in found)


class Computing(nn.Module):
    """Takes longer for deterministic kernels, or not."""

    def __init__(self, clock: MadeTime, longer_s: float) -> None:
        super().__init__()
        self.clock, self.longer_s, self.layer = clock, longer_s, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_on = torch.are_deterministic_algorithms_enabled()
        self.clock.sleep(0.01 + self.longer_s * is_on)
        return self.layer(x)


@pytest.mark.parametrize(("longer_s", "is_said"), [(0.0, False), (-0.002, False), (0.005, True)])
def test_what_a_trial_refutes_is_not_said(monkeypatch, longer_s, is_said):
    net = Computing(install(monkeypatch, tick_s=1e-6), longer_s)

    def step() -> None:
        net(torch.ones(2, 4)).sum().backward()
        net.zero_grad()

    torch.use_deterministic_algorithms(True)
    try:
        found = advise(step, budget_s=10)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.skipped == {}
    assert ("deterministic" in {one.rule for one in found.opportunities}) == is_said
