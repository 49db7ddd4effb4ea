"""Optimizers that a measured step makes are planned for, switched inside the step and released."""

import threading
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planted import examined
from torch import nn
from training import drained

from speedkit_jupyter import benchmark
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.pool import pooled
from speedkit_jupyter.rounds.sampler import Policy
from speedkit_jupyter.step.step import step_of
from speedkit_jupyter.step.variants import variant

pytestmark = [pytest.mark.usefixtures("trusted"), pytest.mark.filterwarnings("ignore:seen")]

FUSED = "baseline,fused_optimizer"


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


@pytest.fixture
def seen() -> SimpleQueue:
    """Return a queue for the records of steps, because measurements restore lists."""
    return SimpleQueue()


def train(model: nn.Module, optimizer: Any, seen: SimpleQueue, times: int = 2) -> None:
    for _ in range(times):
        model(torch.ones(4, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    groups = {group.get("fused") for group in optimizer.param_groups}
    seen.put((*groups, optimizer.defaults.get("fused"), optimizer))


@pytest.mark.sampled(3)
@pytest.mark.checked
@pytest.mark.parametrize("made_once", [False, True])
def test_it_is_fused_inside_the_variants_steps_and_only_there(model, seen, made_once, made_time):
    kept = SimpleNamespace(optimizer=None)

    def step() -> None:
        optimizer = kept.optimizer or torch.optim.AdamW(model.parameters())
        kept.optimizer = optimizer if made_once else None
        train(model, optimizer, seen)

    fused = examined(step, ["fused_optimizer"], model).records[1]
    assert fused.applied == {"fused_optimizer": True}
    assert fused.failure is None
    assert fused.times_s
    assert fused.accuracy.verdict in ("exact", "rounding")
    every = drained(seen)
    inside = [settings for *settings, _ in every]
    assert {tuple(settings) for settings in inside} == {(None, None), (True, True)}
    if not made_once:  # a kept optimizer is restored
        assert not any(group.get("fused") for *_, one in every for group in one.param_groups)
    assert kept.optimizer is None


def test_optimizers_of_other_threads_and_models_are_left_alone(model, seen):
    other = nn.Linear(8, 2)
    elsewhere: SimpleQueue = SimpleQueue()

    def step() -> None:
        train(model, torch.optim.AdamW(model.parameters()), seen)
        train(other, torch.optim.AdamW(other.parameters()), elsewhere)
        thread = threading.Thread(
            target=lambda: train(model, torch.optim.SGD(model.parameters(), 0.0), elsewhere)
        )
        thread.start()
        thread.join()

    with pytest.warns(match="elsewhere"):
        benchmark(step, FUSED, model=model, budget_s=0.3)
    assert (True, True) in {tuple(settings) for *settings, _ in drained(seen)}
    assert {tuple(settings) for *settings, _ in drained(elsewhere)} == {(None, None)}


@pytest.mark.checked
@pytest.mark.parametrize("times", [2, 4])
@pytest.mark.parametrize("is_made_inside", [True, False])
def test_gradients_are_unscaled_once_for_each_step_in_fp16(model, seen, is_made_inside, times):
    outside = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> None:
        inside = torch.optim.AdamW(model.parameters()) if is_made_inside else outside
        train(model, inside, seen, times)

    found = benchmark(step, "baseline,fp16", model=model, budget_s=0.6)
    assert found.records[1].failure is None
    assert found.records[1].accuracy.verdict == "rounding", found.records[1].accuracy


def test_the_facts_of_a_step_are_known_after_its_warm_up_and_frozen(model):
    def step(ctx) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with ctx.autocast():
            loss = model(torch.ones(4, 8)).sum()
        loss.backward()
        optimizer.step()

    measured = step_of(step)
    variants = [variant("baseline"), variant("bf16")]
    with pooled(measured, 3) as pool:
        given = variants, Budget(0.5)
        list(pool.baseline(*given))
        list(pool.others(pool.runners["baseline"], *given, Policy()))
    facts = pool.runners["baseline"].facts
    assert facts.asked == {"autocast"}
    assert [made.name for made in facts.made] == ["SGD"]
    assert facts.leaves
    assert not facts.repeats.afresh
    assert all(runner.facts is facts for runner in pool.runners.values())
