"""What is far slower costs a search one look, whatever it is combined with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import tune
from speedkit_jupyter.optimizations.threads import Threads
from speedkit_jupyter.tuning.candidates import Candidate, combinations, strongest
from speedkit_jupyter.tuning.culprits import Culprits

pytestmark = pytest.mark.usefixtures("trusted")


@pytest.fixture
def searched(made_time, monkeypatch) -> Any:
    """`searched(seconds, budget_s)`: the search, and how often the step ran per threads."""
    many = torch.get_num_threads() + 1
    monkeypatch.setattr(Threads, "candidates", lambda self, hardware, facts: (many,))

    def run(seconds: Any, budget_s: float) -> tuple[Any, list[float], str]:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2))
        optimizer = torch.optim.AdamW(network.parameters())
        x, slow = torch.rand(2, 1, 8, 8), list[float]()

        def step() -> None:
            fused = bool(optimizer.param_groups[0]["fused"])
            took = seconds(fused, torch.get_num_threads() == many)
            if took > 0.03:
                slow.append(took)
            made_time.sleep(took)
            network(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        began = made_time.now_s()
        found = tune(step, model=network, optimizer=optimizer, budget_s=budget_s)
        return found, [*slow, made_time.now_s() - began], f"threads:{many}"

    return run


@pytest.mark.sampled(3)
@pytest.mark.parametrize("times", [40, 300, 800])
def test_what_is_far_slower_takes_its_combinations_with_it(searched, times):
    tuning, (*slow, took_s), word = searched(
        lambda fused, many: 0.002 * (0.5 if fused else 1) * (times if many else 1), 5
    )
    assert tuning.winner.name == "fused_optimizer"
    assert len(slow) <= 4
    assert took_s < 5 * 1.25
    reasons = {one.name: one.reason for one in tuning.rejected}
    left_out = [
        why for name, why in reasons.items() if why.startswith("left out: ") and word in why
    ]
    assert left_out
    assert any("far slower than baseline" in why for why in reasons.values())


@pytest.mark.parametrize(
    ("seen", "name", "blamed"),
    [
        ([("a", True)], "a+b", "a"),
        ([("a", True)], "b", ""),
        ([("b", False), ("a+b", True)], "a+c", "a"),
        ([("a", False), ("b", False), ("a+b", True)], "a+c", ""),
        ([("a", False), ("b", False), ("a+b", True)], "a+b+c", "a+b"),
        ([("a+b", True)], "b", ""),
        ([("a+b", True), ("a", False)], "b+c", "b"),
    ],
)
def test_blamed_is_what_no_other_variant_ran_well_with(seen, name, blamed):
    culprits = Culprits()
    for one, is_slow in seen:
        culprits.note(one, is_slow)
    why = culprits.why(name)
    assert why.endswith(
        (f"left out: {blamed} was far slower", f"it lies at {blamed}") if blamed else ""
    )
    assert bool(why) is bool(blamed)


def test_each_part_of_the_strongest_combination_is_tried_alone_right_after_it():
    singles = [
        Candidate({"threads": 2}),
        Candidate({"channels_last": True}),
        Candidate({"precision": "bf16"}),
        Candidate({"fused_optimizer": True}),
    ]
    start = strongest(singles)
    names = [one.name for one in combinations(singles, start)]
    assert names[0] == start.name
    assert set(names[1:4]) == {"channels_last", "bf16", "fused_optimizer"}
    assert len(names) == len(set(names)) == 15
