"""A budget limits the clock time of searches and benchmarks, however long their steps are."""

import random
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
from torch import nn

from speedkit_jupyter import benchmark, tune
from speedkit_jupyter.machines import gemm_rates
from speedkit_jupyter.machines.gemm_rates import GemmRates
from speedkit_jupyter.rounds import budget as budgets
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.search.races import SearchBudget
from speedkit_jupyter.search.search import PlanSearch
from speedkit_jupyter.step.step import step_of


@pytest.fixture
def timed(work) -> Callable[..., tuple[nn.Module, Any, Callable[[], None]]]:
    """Return `timed(step_s, fused)`; the step takes `step_s` s, or `fused` times that if fused."""
    return lambda step_s, fused=0.5: work(lambda on: step_s * (fused if on.fused else 1.0))


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("step_s", [0.1, 0.5, 2.0])
def test_without_a_budget_there_is_time_for_a_clear_answer_and_that_is_said(timed, step_s):
    network, optimizer, step = timed(step_s)
    search = PlanSearch(step_of(step, network, optimizer))
    said = [one.text for one in search.run()]
    expected = max(10.0, 60 * step_s)
    assert f"one step takes {step_s:.2g} s: about {expected:.0f} s" in said[1]
    assert search.result().winner.name == "fused_optimizer"
    assert search.result().confirmed
    comparison = benchmark(step, "baseline,fused_optimizer", model=network, optimizer=optimizer)
    assert comparison.verdict(comparison.records[1]) == "faster"
    assert "budget" not in comparison.baseline.notes


def test_too_short_a_budget_gives_fewer_variants_and_names_the_others(timed):
    network, optimizer, step = timed(0.5)
    names = "baseline,fused_optimizer,channels_last,sdpa:math,threads:2,compile"
    found = benchmark(step, names, model=network, optimizer=optimizer, budget_s=20)
    measured = [one.name for one in found.records if one.times_s]
    assert measured[:2] == ["baseline", "fused_optimizer"]
    assert found.verdict(found.records[1]) == "faster"
    assert len([one for one in found.records if one.why_not_measured]) == 6 - len(measured) > 0
    assert found.records[-1].first_call_s is None  # it was not compiled
    assert "left out: 20 s are too short" in " ".join(repr(found).split())


@pytest.mark.parametrize("others", ["", ",channels_last"])
def test_what_is_too_slow_for_a_single_round_is_left_out_with_its_figure(timed, others):
    """Check that other variants are timed even if one is very slow, as emulated bf16 may be."""
    network, optimizer, step = timed(0.5, fused=30.0)
    names = f"baseline,fused_optimizer{others}"
    found = benchmark(step, names, model=network, optimizer=optimizer, budget_s=40)
    first, slow, *rest = found.records
    assert all(len(one.times_s) >= 2 for one in (first, *rest))
    assert "far slower than baseline: 30.0 times in its fastest step" in slow.why_not_measured
    assert found.best is None or found.best is not slow


@pytest.mark.parametrize("budget_s", [15, 25, 40, 60, 90])
def test_what_is_proven_faster_is_always_checked_and_within_the_budget(timed, made_time, budget_s):
    network, optimizer, step = timed(2.0)
    names, began_s = "baseline,fused_optimizer", made_time.now_s()
    found = benchmark(step, names, model=network, optimizer=optimizer, budget_s=budget_s)
    (_, fused), took_s = found.records, made_time.now_s() - began_s
    assert found.verdict(fused) == ("faster" if budget_s > 30 else "too noisy")
    assert fused.accuracy is None or fused.accuracy.verdict != "not checked"
    assert took_s <= 1.25 * budget_s


def test_what_compiling_takes_is_no_part_of_the_budget(made_time, monkeypatch):
    graphs = iter((0, 1, 1, 1))
    monkeypatch.setattr(budgets, "graphs", lambda: next(graphs))
    budget = Budget(10.0, made_time.perf_counter)
    with budget.compiling_excluded(1.0):
        made_time.sleep(21.0)
    with budget.compiling_excluded(1.0):
        made_time.sleep(3.0)
    assert budget.spent_s == pytest.approx(4.0, abs=0.01)


def test_a_budget_within_another_ends_with_it(made_time):
    whole = Budget(10.0, made_time.perf_counter)
    part = Budget(8.0, made_time.perf_counter, within=whole)
    made_time.sleep(5.0)
    part.exclude(1.0)
    assert part.spent_s == pytest.approx(4.0, abs=0.01)
    assert whole.spent_s == pytest.approx(4.0, abs=0.01)
    whole.reserved_s = 4.0
    assert whole.allows(2.9)
    assert part.allows(2.9)
    assert not part.allows(3.1)
    part.reserved_s = 1.0
    assert not part.allows(2.9)


@pytest.mark.parametrize(("first_s", "later_s"), [(4.0, 0.2), (0.2, 0.6)])
def test_a_default_budget_follows_the_steps_that_are_measured(work, made_time, first_s, later_s):
    """Let other programs slow down the first second, or all later steps."""
    *parts, step = work(lambda on: first_s if made_time.now_s() < 1 else later_s, linear=4)
    search = PlanSearch(step_of(step, *parts))
    began_s = made_time.now_s()
    list(search.run())
    took_s = made_time.now_s() - began_s
    # The budget differs by machine, because some machines have more plans to prove.
    assert 60 * later_s <= search.budget.seconds <= 240 * later_s
    assert took_s < 1.25 * search.budget.seconds + first_s


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("takes_s", [2.5, 400.0])
@pytest.mark.slow
def test_engines_are_measured_within_a_part_of_the_budget(timed, made_time, takes_s, monkeypatch):
    patience = []

    def measured(machine: str, threads: int, patience_s: float) -> GemmRates:
        patience.append(patience_s)
        made_time.sleep(min(takes_s, patience_s))
        why = "the machine is busy" if takes_s > patience_s else ""
        return GemmRates(blas=1.0, onednn=1.0, failure=why)

    monkeypatch.setattr(gemm_rates, "measured", measured)
    network, optimizer, step = timed(0.01)
    search = PlanSearch(step_of(step, network, optimizer), 20.0)
    list(search.run())
    tuning = search.result()
    assert patience == [5.0]
    assert tuning.confirmed
    assert tuning.seconds <= 1.25 * 20 + 0.01
    said = any("gemm was not tried: the machine is busy" in note for note in tuning.notes)
    assert said is (takes_s > 5)


def test_on_a_busy_machine_a_default_budget_is_twice_that_of_the_fastest_steps():
    budget = SearchBudget(None)
    budget.follow([0.3, 2.0, 9.0], is_busy=True)
    assert (budget.step_s, budget.seconds) == (2.0, 2 * 60 * 0.3)
    budget.follow([0.3, 0.3])
    budget.follow(is_busy=True)
    assert budget.seconds == 2 * 60 * 0.3


# Each function returns a step's seconds, given its number, the clock's time, `fused` and chance.
KINDS = {
    "every 20th 30 times as long": lambda n, now, fused, chance: 0.05 * (30 if n % 20 == 19 else 1),
    "longer each time": lambda n, now, fused, chance: min(0.004 * n, 4.0),
    "heavy tails": lambda n, now, fused, chance: min(0.02 * chance.paretovariate(0.9), 20.0),
    "bursts of load": lambda n, now, fused, chance: 0.1 * (8 if now % 3 < 1 else 1),
    "30 times as long fused": lambda n, now, fused, chance: 0.05 * (30 if fused else 1),
}


@pytest.fixture
def varying(work, made_time):
    """Return `varying(kind)`, which makes a step, the arguments of `tune`, and a queue of times."""

    def make(kind):
        # Benchmarks don't restore queues; `chance` gets a new seed before each call.
        seen, chance = SimpleQueue(), random.Random(0)

        def seconds(on):
            chance.seed(seen.qsize())
            took_s = KINDS[kind](seen.qsize(), made_time.now_s(), on.fused, chance)
            seen.put(took_s)
            return took_s

        network, optimizer, step = work(seconds, linear=4)
        return step, {"model": network, "optimizer": optimizer}, seen

    return make


@pytest.mark.sampled(8)
@pytest.mark.parametrize("budget_s", [2.0, 15.0])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_search_ends_within_its_budget_and_the_longest_step(varying, made_time, kind, budget_s):
    step, parts, seen = varying(kind)
    began = made_time.now_s()
    tuning = tune(step, budget_s=budget_s, **parts)
    longest_s = max(seen.get() for _ in range(seen.qsize()))
    assert made_time.now_s() - began <= 1.25 * budget_s + longest_s
    assert not (tuning.helped and kind.startswith("30 times") and "fused" in tuning.winner.name)
