"""Test docs/contract.md, "Numbers": intervals, verdicts (also on a busy machine) and budgets."""

import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training import training_step

from speedkit_jupyter import benchmark, tune
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.comparison import Comparison, Record
from speedkit_jupyter.rounds.sampler import Policy, Sampler
from speedkit_jupyter.rounds.statistics import FAR_PAIRS, paired_ratio

STEP_S, RUNS = 0.01, 200


class Drawn:
    """A variant that runs nothing; its block times are random, as on a noisy machine."""

    def __init__(self, name: str, noise: Callable[[], float]) -> None:
        self.record, self.step_s, self.fastest_s, self.worst_s = Record(name), *[STEP_S] * 3
        self.noise = noise


class Drawing(Sampler):
    """The real sampler, with random block times in place of measured times."""

    def _block(self, runner: Any) -> tuple[float, float]:
        return STEP_S * runner.noise(), 0.0


def called_other(variants: int, seed: int) -> list[str]:
    """Return the variants that a run calls faster or slower, although all are equally fast."""
    order = random.Random(seed)
    speed, now_s = 1.0, 0.0

    def noise() -> float:
        """Return a factor with drift and heavy tails, and advance the clock by the block's time."""
        nonlocal speed, now_s
        speed *= math.exp(order.gauss(0, 0.02))
        tail = order.gauss(0, 1) / max(abs(order.gauss(0, 1)), 0.05)
        drawn = speed * math.exp(0.03 * tail)
        now_s += STEP_S * drawn
        return drawn

    names = ["baseline", *(f"same {number}" for number in range(variants))]
    runners = [Drawn(name, noise) for name in names]
    budget = Budget(STEP_S * len(runners) * 160, lambda: now_s)
    records = [runner.record for runner in runners]
    sampler = Drawing(runners, budget.seconds, records, budget)
    deque(sampler.run(Policy()), maxlen=0)
    found = sampler.comparison()
    return [row.name for row in records[1:] if found.verdict(row) in ("faster", "slower")]


@pytest.mark.slow
@pytest.mark.parametrize("variants", [1, 4])
def test_an_interval_holds_at_its_level_under_early_stopping_and_several_variants(variants):
    runs = RUNS // variants
    cried = sum(bool(called_other(variants, seed)) for seed in range(runs))
    assert cried <= 0.05 * runs  # the seeds are fixed


def test_a_planted_difference_is_inside_the_interval_and_found():
    order = np.random.default_rng(0)
    inside = 0
    for _ in range(RUNS):
        drift = np.exp(np.cumsum(order.normal(0, 0.05, 80)))
        noise = drift * np.exp(0.05 * order.standard_t(3, (2, 80)))
        ratio = paired_ratio(noise[0], noise[1] / 1.2, 0.05)
        inside += ratio.low <= 1.2 <= ratio.high
        assert ratio.low > 1
    assert inside >= 0.95 * RUNS - 2 * math.sqrt(RUNS * 0.05 * 0.95)


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_other_work_beside_one_of_two_is_named_and_makes_none_of_them_faster(share):
    alone_s = [STEP_S * (1 + 0.01 * (at % 5)) for at in range(40)]
    waited_s = [2 * STEP_S] * 40  # only the baseline waits: it looks three times as slow
    held_up_s = [seconds + waited for seconds, waited in zip(alone_s, waited_s, strict=True)]
    few = 40 - int(40 * share)
    quiet = Record("baseline", held_up_s[few:] + alone_s[:few])
    quiet.waited_s = waited_s[few:] + [0.0] * few
    plan = Record("plan", alone_s[few:] + alone_s[:few], waited_s=[0.0] * 40)
    found = Comparison((quiet, plan), {}, 1.0)
    ratio = found.ratio(plan)
    assert ratio is not None
    assert ratio.low <= 1 <= ratio.high  # 1 is the ratio without the other work
    assert found.verdict(plan) != "faster"
    assert "other programs delayed" in found.busy
    fewer = Comparison((Record("baseline", alone_s[:few]), Record("plan", alone_s[:few])), {}, 1.0)
    beside = fewer.ratio(fewer.records[1]) if few else None
    if beside is not None and beside.is_bounded:
        assert ratio.high - ratio.low >= beside.high - beside.low - 1e-9


@pytest.mark.parametrize("most", [0.3, 2.0])
@pytest.mark.parametrize(("threads", "is_found"), [(None, True), (1, False)])
def test_a_gain_is_found_beside_other_work_unless_fewer_threads_wait(threads, is_found, most):
    order = np.random.default_rng(0)
    plan = Record("plan", applied={"threads": threads} if threads else {})
    baseline = Record("baseline")
    for record, alone_s in ((baseline, 1.5 * STEP_S), (plan, STEP_S)):
        record.waited_s = [alone_s * share for share in order.uniform(0.1, most, 30)]
        record.times_s = [alone_s + waited for waited in record.waited_s]
    found = Comparison((baseline, plan), {}, 1.0)
    ratio = found.ratio(plan)
    assert ratio is not None
    assert ratio.low < 1.5 < ratio.high
    assert found.verdict(plan) == ("faster" if is_found else "too noisy")
    assert repr(found).startswith("The machine was busy: other programs delayed 30 of 30 rounds")


def work(made_time: Any, step_s: float) -> tuple[Callable[[], None], dict[str, Any]]:
    model, x = nn.Linear(8, 2), torch.rand(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def loss() -> torch.Tensor:
        made_time.sleep(step_s / (1 + bool(optimizer.param_groups[0]["fused"])))
        return model(x).sum()

    return training_step(optimizer, loss), {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("step_s", [0.002, 0.05, 0.4, 2.0])
@pytest.mark.parametrize("measure", ["benchmark", "tune"])
def test_a_measurement_takes_at_most_a_quarter_more_than_its_budget(made_time, measure, step_s):
    step, given = work(made_time, step_s)
    began_s = made_time.now_s()
    if measure == "tune":
        tune(step, **given, budget_s=12)
    else:
        benchmark(step, "baseline,fused_optimizer,sdpa:math,threads:1", **given, budget_s=12)
    assert made_time.now_s() - began_s <= 1.25 * 12


@pytest.mark.parametrize("step_s", [0.05, 0.2, 30.0])
def test_without_rounds_there_is_no_verdict_and_where_they_fit_there_are_some(made_time, step_s):
    step, given = work(made_time, step_s)
    found = benchmark(step, "baseline,fused_optimizer", **given, budget_s=5)
    record = found.records[1]
    assert len(record.times_s) >= (3 if step_s < 1 else 0)
    if not record.times_s:
        assert found.verdict(record) == "too noisy"
        assert record.why_not_measured
    assert found.best is None or len(record.times_s) >= FAR_PAIRS[0]
