"""A search that could not tell says so, keeps nothing, and takes no plan away."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups, tune
from speedkit_jupyter.measure.results.statistics import FIRST_LOOK
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.support import database
from speedkit_jupyter.tuning.candidates import Candidate
from speedkit_jupyter.tuning.search import Search

pytestmark = pytest.mark.usefixtures("trusted")


@pytest.fixture
def work(made_time) -> Callable[..., tuple[nn.Module, Any, Callable[[], None]]]:
    """`work(seconds)`: a step that takes `seconds(fused)`."""

    def make(seconds: Callable[[bool], float]) -> tuple[nn.Module, Any, Callable[[], None]]:
        torch.manual_seed(0)
        network = nn.Linear(8, 2)
        optimizer = torch.optim.AdamW(network.parameters())
        x = torch.rand(4, 8)

        def step() -> None:
            made_time.sleep(seconds(bool(optimizer.param_groups[0]["fused"])))
            network(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return network, optimizer, step

    return make


def test_a_search_without_time_could_not_tell_and_nothing_is_remembered(work):
    network, optimizer, step = work(lambda fused: 20.0)
    tuning = tune(step, model=network, optimizer=optimizer, budget_s=15)
    assert tuning.unclear
    assert repr(tuning).startswith("Could not tell: one step takes 20 s")
    assert "could not tell" in tuning.config.why_left
    assert database.learned() == []


def test_a_search_that_found_that_nothing_helps_is_remembered(work):
    network, optimizer, step = work(lambda fused: 0.01 * (1 + fused))
    tuning = tune(step, model=network, optimizer=optimizer, budget_s=4)
    assert not tuning.helped
    assert tuning.unclear == ""
    assert [one.plan["values"] for one in database.learned()] == [{}]


def test_apply_without_a_winner_restores_the_model(work):
    network, optimizer, step = work(lambda fused: 0.01 * (1 + fused))
    tuning = tune(step, model=network, optimizer=optimizer, budget_s=4)
    _, first = apply_speedups(network, SpeedConfig(threads=1))
    _, second = apply_speedups(network, SpeedConfig(sdpa="math"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.apply() == []
    assert applied_to(network) is None
    assert first.restored
    assert second.restored


def test_apply_after_a_search_that_could_not_tell_leaves_the_plan_in_force_and_says_so(work):
    network, optimizer, step = work(lambda fused: 20.0)
    tuning = tune(step, model=network, optimizer=optimizer, budget_s=15)
    assert tuning.apply() == []
    with apply_speedups(network, SpeedConfig(threads=1))[1] as context:
        with pytest.warns(UserWarning, match="another plan is in force"):
            assert tuning.apply() == []
        assert context.active


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fused_s", "stays"), [(0.010, False), (0.00999, False), (0.0098, True), (0.005, True)]
)
def test_a_part_stays_only_where_leaving_it_out_costs_something(made_time, fused_s, stays):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2))
    optimizer = torch.optim.AdamW(network.parameters())
    x = torch.rand(2, 1, 8, 8)

    def step() -> None:
        fused = bool(optimizer.param_groups[0]["fused"])
        last = network[0].weight.stride()[1] == 1
        made_time.sleep((fused_s if fused else 0.010) * (0.6 if last else 1.0))
        network(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    tuning = tune(step, model=network, optimizer=optimizer, budget_s=3)
    assert ("fused" in tuning.winner.name) is stays
    assert "channels_last" in tuning.winner.name
    assert all(ratio.low > 1 for _, ratio in tuning.parts())


def test_of_two_parts_that_do_the_same_only_one_stays(made_time):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2))
    optimizer = torch.optim.AdamW(network.parameters())
    x = torch.rand(2, 1, 8, 8)

    def step() -> None:
        fused = bool(optimizer.param_groups[0]["fused"])
        last = network[0].weight.stride()[1] == 1
        made_time.sleep(0.006 if fused or last else 0.010)
        network(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    search = Search(step_of(step, network, optimizer), 3.0)
    search.budget.step_s = 0.006
    both = Candidate({"channels_last": True, "fused_optimizer": True})
    for name in both.values:  # as a race leaves it
        search.known.refuse(name, "falls behind")
    for _ in search.prove(both):
        pass
    assert len(search.result().winner.values) == 1
    assert search.result().winner.name not in [one.name for one in search.result().rejected]
    assert search.result().confirmed


def test_what_lowers_precision_stays_only_where_it_is_worth_it(made_time):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(network.parameters())
    x = torch.rand(4, 8)

    def step() -> None:
        fused = bool(optimizer.param_groups[0]["fused"])
        lowered = torch.is_autocast_enabled("cpu")
        made_time.sleep(0.010 * (0.5 if fused else 1.0) * (0.985 if lowered else 1.0))
        network(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    tuning = tune(step, model=network, optimizer=optimizer, budget_s=3)
    assert tuning.winner.name == "fused_optimizer"


@pytest.mark.parametrize(("factor", "goes_on"), [(1.1, False), (0.97, True)])
def test_a_proof_goes_on_only_while_something_speaks_for_the_plan(made_time, factor, goes_on):
    network = nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(network.parameters())
    x = torch.rand(4, 8)

    def step() -> None:
        fused = bool(optimizer.param_groups[0]["fused"])
        noise = random.Random(clock.now()).uniform(0.9, 1.1)  # of the clock: nobody puts that back
        made_time.sleep(0.1 * noise * (factor if fused else 1.0))
        network(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    search = Search(step_of(step, network, optimizer), 30.0)
    search.budget.step_s = 0.1
    for _ in search.prove(Candidate({"fused_optimizer": True})):
        pass
    (proof,) = search.result().stages
    assert (len(proof.comparison.baseline.times_s) > FIRST_LOOK) is goes_on
