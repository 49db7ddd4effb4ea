"""A search that could not decide says so, stores nothing, and leaves the plan in force."""

import random
import warnings
from itertools import chain, repeat

import pytest
import torch

from speedkit_jupyter import SpeedConfig, apply_speedups, tune
from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.right.judge import Accuracy
from speedkit_jupyter.rounds import busy_machine, clock
from speedkit_jupyter.rounds.comparison import Comparison, Record
from speedkit_jupyter.rounds.statistics import planned_looks
from speedkit_jupyter.search.candidates import Candidate
from speedkit_jupyter.search.races import Proof, SearchBudget, proven_gains
from speedkit_jupyter.search.search import PlanSearch
from speedkit_jupyter.search.thresholds import ENOUGH_ROUNDS
from speedkit_jupyter.search.tried_plans import Stage, TimedPlan
from speedkit_jupyter.step.step import step_of
from speedkit_jupyter.support import database

pytestmark = [pytest.mark.usefixtures("trusted"), pytest.mark.long]


def test_a_search_that_could_not_tell_remembers_nothing_and_leaves_the_plan_in_force(work):
    network, optimizer, step = work(lambda on: 20.0, linear=8)
    tuning = tune(step, model=network, optimizer=optimizer, budget_s=15)
    assert tuning.unclear
    assert repr(tuning).startswith("Could not decide: one step takes 20 s")
    assert "could not decide" in tuning.config.why_left
    assert database.learned() == []
    with pytest.warns(UserWarning, match="could not decide, so nothing is applied$"):
        assert tuning.apply() == []
    with apply_speedups(network, SpeedConfig(threads=1))[1] as context:
        with pytest.warns(UserWarning, match="nothing is applied"):
            assert tuning.apply() == []
        assert context.active


def test_that_nothing_helps_is_said_and_remembered_and_apply_restores_the_model(work):
    network, optimizer, step = work(lambda on: 0.02 * (1 + on.fused + on.last))
    tuning = tune(step, model=network, optimizer=optimizer, budget_s=10)
    assert repr(tuning).startswith("Nothing to gain: no plan is more than ")
    for name in ("fused_optimizer", "channels_last"):
        assert tuning.rejected[name].startswith(("slower", "not proven, too few rounds"))
    assert (tuning.helped, tuning.unclear) == (False, "")
    assert [one.value["values"] for one in database.learned()] == [{}]
    _, first = apply_speedups(network, SpeedConfig(threads=1))
    _, second = apply_speedups(network, SpeedConfig(sdpa="math"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.apply() == []
    assert applied_to(network) is None
    assert first.restored
    assert second.restored


@pytest.mark.usefixtures("two_threads")
def test_threads_are_neither_proven_likely_nor_forgotten_while_others_compute(work, monkeypatch):
    busy = [True]
    share = lambda: 0.2 * bool(busy)  # noqa: E731
    monkeypatch.setattr(busy_machine.Interruptions, "seconds", lambda self, s: s * share())
    step = work(lambda on: 0.03 / (1 + (torch.get_num_threads() == 1)), linear=8)[2]

    alone = Candidate({"threads": 1})
    monkeypatch.setattr("speedkit_jupyter.search.candidates.candidates", lambda *given: [alone])
    tuning = tune(step, budget_s=3)
    assert (tuning.helped, tuning.likely, database.learned()) == (False, "", [])
    assert "Could not decide" in repr(tuning)
    busy.clear()
    assert tune(step, budget_s=3).winner.name == alone.name
    busy.append(True)
    assert "could not be checked" in " ".join(tune(step, budget_s=3).notes)
    assert [one.value["name"] for one in database.learned()] == [alone.name]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fused_s", "stays"), [(0.010, False), (0.00999, False), (0.0098, True), (0.005, True)]
)
def test_a_part_stays_only_where_leaving_it_out_costs_something(work, fused_s, stays):
    step = work(lambda on: (fused_s if on.fused else 0.010) * (0.6 if on.last else 1.0))[2]
    tuning = tune(step, budget_s=3)
    assert ("fused" in tuning.winner.name) is stays
    assert "channels_last" in tuning.winner.name
    assert [name for name, ratio in tuning.parts() if ratio.low <= 1] == []


def test_of_two_parts_that_do_the_same_only_one_stays(work):
    search = PlanSearch(step_of(work(lambda on: 0.006 if on.fused or on.last else 0.010)[2]), 3.0)
    search.budget.step_s = 0.006
    both = Candidate({"channels_last": True, "fused_optimizer": True})
    for name in both.values:  # as after a race
        search.tried.set_reason(name, "slower than the best, dropped")
    list(search.prove(both))
    tuning = search.result()
    assert len(tuning.winner.values) == 1
    assert tuning.winner.name not in tuning.rejected
    assert tuning.confirmed


def test_what_lowers_precision_stays_only_where_it_is_worth_it(work, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_HARDWARE", "cpu_avx512_bf16")
    step = work(lambda on: (0.005 if on.fused else 0.01) * (0.985 if on.bf16 else 1), linear=8)[2]
    assert tune(step, budget_s=3).winner.name == "fused_optimizer"


@pytest.mark.parametrize(("factor", "goes_on"), [(1.1, False), (0.95, True)])
def test_a_proof_goes_on_only_while_something_speaks_for_the_plan(work, factor, goes_on):
    def seconds(on) -> float:
        noise = random.Random(clock.now()).uniform(0.9, 1.1)  # the clock is not restored
        return 0.1 * noise * (factor if on.fused else 1.0)

    search = PlanSearch(step_of(work(seconds, linear=8)[2]), 30.0)
    search.budget.step_s = 0.1
    list(search.prove(Candidate({"fused_optimizer": True})))
    (proof,) = search.result().stages
    _, early_look, *_ = planned_looks(rounds=150)
    assert (len(proof.comparison.baseline.times_s) > early_look) is goes_on


def test_a_proof_of_two_plans_that_are_alike_ends_without_an_order(work):
    def seconds(on) -> float:
        noise = random.Random(clock.now()).uniform(0.95, 1.05)
        return noise * (0.06 if on.fused or on.last else 0.1)

    search = PlanSearch(step_of(work(seconds)[2]), 60.0)
    search.budget.step_s = 0.01
    list(search.prove(Candidate({"channels_last": True, "fused_optimizer": True})))
    tuning = search.result()
    assert tuning.helped
    (proof,) = tuning.stages
    assert len(proof.comparison.baseline.times_s) < 4 * ENOUGH_ROUNDS  # about 200 fit the budget


def test_a_plan_stays_likely_while_it_waits_for_another_race(work):
    search = PlanSearch(step_of(work(lambda on: 0.01)[2]), 30.0)
    fused = Candidate({"fused_optimizer": True})
    search.tried.add([fused])
    times = (Record("baseline", [0.02] * 4), Record(fused.name, [0.01] * 4))
    search.tried.stages.append(Stage("checking the learned plan", Comparison(times, {}, 10.0)))
    search.tried.raced.discard(fused.name)
    search.tuning.conclude("", 1.0)
    assert search.result().likely == fused.name
    assert "likely, not proven" in search.result().likely_config.request("fused_optimizer").measured


def proof_of(ratios, parts) -> tuple[list[Candidate], Comparison]:
    """Return a plan and its part bf16, and a comparison of 18 rounds; the plan takes 1 s."""
    whole = Candidate({"precision": "bf16", "fused_optimizer": True})
    times = {"baseline": ratios, whole.name: [1.0] * 3, "bf16": parts}
    records = [Record(name, 6 * each, accuracy=Accuracy("exact")) for name, each in times.items()]
    return [whole, whole.part("precision")], Comparison(tuple(records), {}, 10.0)


def test_the_noise_of_the_baseline_does_not_hide_the_gain_of_a_part():
    plans, proof = proof_of([1.5, 1.6, 1.7], [1.06, 1.0, 1.06])
    gains = proven_gains({plan.name: TimedPlan.of(proof, plan) for plan in plans})
    assert gains == pytest.approx({plans[0].name: 1.6, "bf16": 1.6 / 1.06})


def test_an_open_part_that_may_matter_extends_a_proof_while_time_is_left():
    plans, proof = proof_of([2.0] * 3, [1.12, 1.03, 0.94])
    for spent_s in (5.0, 25.0):
        now = chain([0.0], repeat(spent_s))
        policy = Proof(plans, SearchBudget(30.0, now=lambda now=now: next(now)))
        assert bool(policy.staying([*proof.records], proof)) is (spent_s == 5.0)
