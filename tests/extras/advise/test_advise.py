"""`advise()` as a whole: the profile, what is watched, and the rules."""

from __future__ import annotations

import warnings

import pytest
import torch
from made_time import MadeTime, install
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from speedkit_jupyter import StateWarning, advise
from speedkit_jupyter.extras.advise.advice import Gain, Opportunity, ranked

pytestmark = pytest.mark.usefixtures("made_time")


@pytest.mark.parametrize(
    ("share", "high"), [(0.06, 1 / 0.94), (0.12, 1 / 0.88), (1.0, 7.0), (0.02, 1 / 0.98)]
)
def test_no_range_exceeds_what_the_share_of_the_step_allows(share, high):
    one = Opportunity("title", "evidence", Gain(1.2, 7.0), "remedy", share=share)
    found = ranked([one], frozenset())
    assert [each.gain.high for each in found] == ([pytest.approx(high)] if high > 1.03 else [])
    assert all(each.gain.low <= each.gain.high for each in found)


class Computing(nn.Module):
    """Takes longer where anomalies are looked for, or not."""

    def __init__(self, clock: MadeTime, longer_s: float) -> None:
        super().__init__()
        self.clock, self.longer_s, self.layer = clock, longer_s, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_on = torch.is_anomaly_enabled()
        self.clock.sleep(0.02 + self.longer_s * is_on)
        return self.layer(x)


@pytest.mark.parametrize(("longer_s", "is_said"), [(0.0, False), (-0.004, False), (0.01, True)])
def test_what_a_trial_refutes_is_not_said(monkeypatch, longer_s, is_said):
    net = Computing(install(monkeypatch, tick_s=1e-6), longer_s)

    def step() -> None:
        net(torch.ones(2, 4)).sum().backward()
        net.zero_grad()

    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        found = advise(step, budget_s=10)
    assert found.skipped == {}
    assert ("anomaly_mode" in {one.rule for one in found.opportunities}) == is_said


def test_a_bar_over_a_loader_can_be_put_back(recwarn):
    tqdm = pytest.importorskip("tqdm.auto").tqdm
    bar, net = tqdm(DataLoader(TensorDataset(torch.ones(4, 4)), 2), disable=True), nn.Linear(4, 4)

    def step() -> None:
        for (x,) in bar:
            net(x).sum().backward()

    advise(step, budget_s=0.1)
    assert [str(one.message) for one in recwarn if one.category is StateWarning] == []
