"""Parts of a plan that bring nothing in the rounds that confirm leave it, whatever time is left."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.optimizations.tf32 import Tf32
from speedkit_jupyter.tuning.search import Search

pytestmark = pytest.mark.usefixtures("trusted")

STEP_S = 0.02  # on the tests' own clock


@pytest.fixture
def three_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third cheap change beside layout and optimizer."""
    monkeypatch.setattr(Tf32, "candidates", lambda self, hardware, facts: ("medium",))


@pytest.mark.usefixtures("three_candidates")
@pytest.mark.sampled(8)
@pytest.mark.parametrize("budget_s", [2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 8.0, 12.0])
def test_of_parts_that_lost_their_gain_one_at_least_goes_and_none_is_kept_unsaid(
    made_time, budget_s
):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    optimizer, x = torch.optim.AdamW(network.parameters()), torch.rand(2, 3, 8, 8)
    confirming: list[bool] = []

    def step() -> None:
        last = network[0].weight.stride()[1] == 1
        others = bool(optimizer.param_groups[0]["fused"]) + (
            torch.get_float32_matmul_precision() == "medium"
        )
        gain = 1 + last + (0 if confirming else 0.2 * others)
        made_time.sleep(STEP_S / gain)
        network(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    search = Search(step_of(step, network, optimizer), budget_s)
    for progress in search.run():
        if progress.text.startswith("confirming"):
            confirming.append(True)
    tuning = search.result()
    assert tuning.confirmed
    assert tuning.winner.values["channels_last"] is True
    idle = [name for name in tuning.winner.values if name != "channels_last"]
    assert len(idle) < 2
    if idle:
        assert any(f"what {idle[0]} adds to it is not" in note for note in tuning.notes)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("budget_s", [1.2, 1.0, 1.1, 1.3, 1.4, 1.6])
def test_a_part_that_seems_to_bring_much_stays_where_the_rounds_are_too_few_to_prove_it(
    made_time, budget_s
):
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    optimizer, x = torch.optim.AdamW(network.parameters()), torch.rand(2, 3, 8, 8)

    def step() -> None:
        last = network[0].weight.stride()[1] == 1
        fused = bool(optimizer.param_groups[0]["fused"])
        made_time.sleep(STEP_S / (1 + 0.34 * last + 0.04 * fused))
        network(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    search = Search(step_of(step, network, optimizer), budget_s)
    for _ in search.run():
        pass
    tuning = search.result()
    assert not tuning.confirmed or tuning.winner.values["channels_last"] is True
