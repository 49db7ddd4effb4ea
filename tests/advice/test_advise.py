"""`advise()` as a whole: the profile, what is watched, and the rules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from speedkit_jupyter import advise


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
