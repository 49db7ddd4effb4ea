"""In a race a plan whose parts were right in others runs unchecked; what leads is checked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter.measure.rounds.benchmark import Benchmark
from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.measure.subject.variants import parse
from speedkit_jupyter.tuning.candidates import Candidate
from speedkit_jupyter.tuning.culprits import Culprits
from speedkit_jupyter.tuning.policies import Race
from speedkit_jupyter.tuning.proof import Proof
from speedkit_jupyter.tuning.right_parts import RightParts
from speedkit_jupyter.tuning.search import Search

WHOLE = "sdpa:math+channels_last+fused_optimizer"
RACE = f"baseline,{WHOLE},sdpa:math+fused_optimizer,channels_last,fused_optimizer"


@pytest.fixture
def step(made_time):
    """A step that is fastest, and wrong, with the fused optimizer and math, and without layout."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2))
    optimizer = torch.optim.AdamW(network.parameters())
    x = torch.rand(2, 1, 8, 8)

    def step() -> None:
        fused = bool(optimizer.param_groups[0]["fused"])
        last = network[0].weight.stride()[1] == 1
        math = not torch.backends.cuda.flash_sdp_enabled()
        is_wrong = fused and math and not last
        made_time.sleep(0.010 - 0.001 * fused - 0.001 * last - 0.005 * is_wrong)
        (network(x).sum() * (1.5 if is_wrong else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step_of(step, network, optimizer)


def verdicts(benchmark: Benchmark) -> dict[str, str]:
    for _ in benchmark.run():
        pass
    records = benchmark.result().records[1:]
    return {one.name: one.accuracy.verdict for one in records if one.accuracy}


@pytest.mark.slow
def test_only_what_is_new_is_checked_and_then_what_leads(step):
    benchmark = Benchmark(step, parse(RACE), 3.0, policy=Race(RightParts(), Culprits()))
    found = verdicts(benchmark)
    assert found[WHOLE] == "exact"
    assert found["sdpa:math+fused_optimizer"] == "wrong"
    assert "channels_last" not in found


def test_a_combination_that_is_wrong_does_not_win_although_its_parts_are_right(step):
    search = Search(step, 3.0)
    stages = search._stages
    for word in ("sdpa:math", "fused_optimizer"):
        stages.right.note(word)
    wrong = Candidate({"sdpa": "math", "fused_optimizer": True})
    for _ in Proof(stages).confirm(wrong, "confirming"):
        pass
    tuning = search.result()
    assert tuning.winner.name == "fused_optimizer"
    assert tuning.confirmed
    winner = next(one for one in tuning.comparison.records if one.name == "fused_optimizer")
    assert winner.accuracy.verdict in ("exact", "rounding")
    assert any(one.name == wrong.name and "wrong" in one.reason for one in tuning.rejected)


def test_what_has_to_be_checked_is_what_has_a_part_that_was_not_right_yet():
    right = RightParts()
    assert right.to_check(["a+b", "a", "b+c", "c", "d"]) == ["a+b", "b+c", "d"]
    right.note("c+d")
    assert right.to_check(["c", "d", "c+e"]) == ["c+e"]
    assert right.are_all_of("c")
    assert not right.is_known("c")
    assert right.is_known("c+d")
