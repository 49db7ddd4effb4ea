"""Check the answers of a search: proven, likely, nothing to gain, not decided."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from speedkit_jupyter.rounds.comparison import Comparison, Record
from speedkit_jupyter.rounds.statistics import percentile_99
from speedkit_jupyter.search.candidates import Candidate
from speedkit_jupyter.search.outcome import INTERRUPTED, Tuning
from speedkit_jupyter.search.tried_plans import Stage, TriedPlans
from speedkit_jupyter.step.step import step_of

pytestmark = pytest.mark.usefixtures("trusted")

FEW, MANY = 4, 60
PLANS = {"bf16": {"precision": "bf16"}, "fused_optimizer": {"fused_optimizer": True}}


def searched(speedups, rounds: int, why: str = "", **more: Any) -> Tuning:
    """Return an ended search; a plan's speed-up is one number, or one number for each round."""
    times = {"baseline": 1.0, **speedups}
    records = []
    for name, factor in times.items():
        factors = [factor] * rounds if isinstance(factor, float) else [*factor]
        records.append(Record(name, [1 / one for one in factors]))
    stage = Stage("the machine's suggestions", Comparison(tuple(records), {}, 10.0))
    tried = {name: Candidate(PLANS.get(name, {"threads": name[8:]})) for name in speedups}
    model = nn.Linear(2, 2)
    tuning = Tuning(step_of(lambda: model.weight, model), tried=TriedPlans([stage], tried), **more)
    tuning.conclude(why, 3.0)
    return tuning


def said(tuning: Tuning) -> str:
    return " ".join(repr(tuning).split())


def test_what_is_likely_is_named_with_its_range_and_how_to_go_on():
    tuning = searched({"bf16": [1.4, 1.9, 1.9, 2.6], "fused_optimizer": 1.2}, FEW)
    assert said(tuning).startswith(
        "Likely: bf16 is probably about 1.90× as fast (1.40× to 2.60× in 4 rounds); "
        "a longer --budget may settle it (in 3 s)"
    )
    assert "--likely # although it is not proven" in said(tuning)
    assert not tuning.helped


def test_that_nothing_is_to_be_gained_comes_with_the_highest_speed_up_that_may_be():
    tuning = searched({"bf16": 1.0, "fused_optimizer": 0.7, "threads:1": [0.98, 1.02] * 30}, MANY)
    assert said(tuning).startswith("Nothing to gain: no plan is more than 1.02× as fast (in 3 s)")
    assert tuning.is_settled


def test_a_verdict_agrees_with_the_number_in_its_row():
    tuning = searched({"bf16": 1.9, "fused_optimizer": 1.7}, MANY)
    tuning.tried.set_reason("fused_optimizer", "not proven faster: about 0.89× in 1 round")
    told = said(tuning)
    assert "0.89×" not in told
    assert "1.70× (1.70× to 1.70×) helps; bf16 is as good or better" in told


def test_one_round_makes_nothing_likely():
    told = said(searched({"bf16": 28.6, "fused_optimizer": 1.2}, 1, "too few undisturbed rounds"))
    assert told.startswith("Could not decide: too few undisturbed rounds; best seen: bf16 is 28.60")
    assert "as fast (in 1 round)" in told
    assert "--likely" not in told


def test_a_plan_stays_likely_that_a_later_benchmark_had_no_time_for():
    tuning = searched({"bf16": 1.9}, FEW)
    late = Record("bf16", notes={"left out": "what was left of the budget is too short"})
    proof = Comparison((Record("baseline", [1.0]), late), {}, 10.0)
    tuning.tried.stages.append(Stage("confirming", proof))
    tuning.conclude("", 3.0)
    assert said(tuning).startswith("Likely: bf16 is probably about 1.90× as fast")


@pytest.mark.parametrize("why", ["", "too few undisturbed rounds", INTERRUPTED])
def test_what_could_not_be_told_names_the_best_seen_with_its_range(why):
    tuning = searched({"bf16": [0.8, 0.97, 1.3], "fused_optimizer": 0.5}, 3, why)
    told = said(tuning)
    assert told.startswith(f"Could not decide: {why}")
    assert "best seen: bf16 is 0.97× as fast (0.80× to 1.30× in 3 rounds); a longer" in told
    assert not tuning.is_settled


def test_what_is_proven_in_this_process_alone_says_so_wherever_it_is_told():
    records = (Record("baseline", [2e-3] * MANY), Record("bf16", [2e-3 / 1.19] * MANY))
    tuning = searched({}, MANY)
    tuning.take(Candidate(PLANS["bf16"]), Comparison(records, {"threads": 2}, 10.0))
    gain, told = "1.19× (1.19× to 1.19×)", said(tuning)
    assert told.startswith(
        "bf16 is 1.19× as fast as baseline, 95 % interval 1.19× to 1.19×, confirmed in fresh "
        "rounds in this process (in 3 s)"
    )
    assert f"measured: bf16 {gain} in this process" in tuning.config.request("precision").measured
    assert tuning.proof == f"bf16 is {gain} as fast as baseline in this process"
    records[0].times_s = [one * 10 for one in records[1].times_s]
    tuning.take(Candidate(PLANS["bf16"]), Comparison(records, {"threads": 2}, 10.0))
    assert "in this process" not in said(tuning)


def test_a_proven_plan_says_that_the_machine_was_busy():
    waits = [1e-1] * MANY
    records = [Record("baseline", [1.0] * MANY, waited_s=waits), Record("bf16", [0.5] * MANY)]
    tuning = searched({}, MANY)
    tuning.take(Candidate(PLANS["bf16"]), Comparison(tuple(records), {}, 10.0))
    tuning.conclude("", 3.0)
    assert said(tuning).startswith("The machine was busy: other programs delayed 60 of 60 rounds")


def test_what_rounds_say_nothing_of_is_not_likely():
    told = said(searched({"bf16": [1.6, 3.0, 7.0, 50.0]}, FEW))
    assert told.startswith("Could not decide: ")
    assert "best seen: bf16, too noisy to tell after 4 rounds" in told


def test_the_table_shows_five_plans_that_mattered_and_folds_the_others():
    names = [f"threads:{number}" for number in range(2, 10)]
    speedups = {name: 0.5 + number / 100 for number, name in enumerate(names)}
    tuning = searched({**speedups, "bf16": 1.5}, FEW)
    tuning.tried.set_reason("compile", "failed: no compiler")
    brief, whole = repr(tuning), tuning.report().to_text()
    shown = [line.split()[0] for line in brief.splitlines() if " in 4 rounds  " in f"{line}  "]
    assert shown == ["bf16", *reversed(names[4:])]
    assert "… 5 more plans: `%speedkit report --notes`" in brief
    assert "no compiler" not in brief
    assert "no compiler" in whole
    assert all(name in whole for name in names)


def test_what_had_no_time_may_still_bring_something():
    tuning = searched({"bf16": 1.0}, MANY)
    assert tuning.tried.why_unclear(0.1) == ""
    assert tuning.tried.why_unclear(0.1, [Candidate({"threads": 1})]) == "1 plan had no time"


def test_a_plan_above_the_limit_of_the_99th_percentile_is_neither_likely_nor_a_winner():
    tuning = searched({"bf16": 1.9, "fused_optimizer": 1.2}, MANY)
    rounds = tuning.stages[0].comparison
    for record, slowest_s in zip(rounds.records, (1.0, 0.9, 0.4), strict=True):
        record.steps_s = [0.3] * 98 + [slowest_s] * 2
    limited = replace(rounds, at_most_s=0.5)
    assert [limited.verdict(one) for one in limited.records[1:]] == ["above the limit", "faster"]
    tuning.tried.stages[0] = Stage("limited", limited)
    tuning.conclude("", 3.0)
    assert tuning.likely == "fused_optimizer"
    assert "99 % of steps take up to 900 ms, above the limit of 500 ms" in said(tuning)


def test_the_99th_percentile_is_the_slowest_of_fewer_than_100():
    assert percentile_99([3.0, 1.0, 2.0]) == 3.0
    assert percentile_99([*range(1, 201)]) == 198
