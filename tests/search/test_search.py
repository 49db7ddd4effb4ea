"""Check what a search finds, confirms, refuses and stores, and when a race drops a plan."""

import math
from functools import partial
from queue import SimpleQueue

import pytest
import torch

from speedkit_jupyter import StepError, tune
from speedkit_jupyter.rounds.comparison import Comparison, Record, TokenTimes
from speedkit_jupyter.search.candidates import Candidate, first_plans
from speedkit_jupyter.search.outcome import MEMORY
from speedkit_jupyter.search.races import PlanRace, SearchBudget, clearly_slower
from speedkit_jupyter.search.search import PlanSearch
from speedkit_jupyter.search.tried_plans import TimedPlan, TriedPlans
from speedkit_jupyter.step.step import step_of
from speedkit_jupyter.support import database

pytestmark = pytest.mark.usefixtures("trusted")

LATE = 0.02  # seconds of a slow step, on the tests' own clock


@pytest.mark.checked
def test_what_helps_is_found_confirmed_and_applied_as_measured(work):
    network, optimizer, step = work(lambda on: LATE / 4 if on.fused else LATE)
    before = [p.detach().clone() for p in network.parameters()]
    tuning = tune(step, budget_s=3)
    assert "fused" in tuning.winner.name
    assert tuning.comparison.verdict(tuning.comparison.records[1]) == "faster"
    assert all(map(torch.equal, before, network.parameters()))
    assert optimizer.param_groups[0]["fused"] is None
    (context,) = tuning.apply()
    assert optimizer.param_groups[0]["fused"] is True
    assert context.plan["fused_optimizer"].source == "measured"
    assert not context.plan["threads"].active
    context.restore()
    assert "confirmed in fresh rounds" in " ".join(repr(tuning).split())
    assert "are as before" in " ".join(tuning.report().to_text().split())


def test_two_that_help_alone_and_hurt_together_are_not_joined(work):
    times = {(0, 0): LATE, (1, 0): LATE / 4, (0, 1): LATE / 2, (1, 1): 2 * LATE}
    tuning = tune(work(lambda on: times[on.fused, on.last])[2], budget_s=6)
    assert tuning.winner.name == "fused_optimizer"
    assert tuning.rejected["channels_last+fused_optimizer"].startswith("slower: ")


@pytest.mark.checked
def test_what_is_wrong_is_never_chosen_however_fast(work):
    def loss(out, on):
        return out.sum() * (1.1 if on.fused else 1.0)

    tuning = tune(work(lambda on: LATE / 8 if on.fused else LATE, loss=loss)[2], budget_s=3)
    assert "fused" not in tuning.winner.name
    assert any("wrong: loss off by 0.1" in reason for reason in tuning.rejected.values())


@pytest.mark.slow
def test_what_fresh_rounds_do_not_confirm_leaves_the_parts_that_they_do(work):
    confirming: SimpleQueue[bool] = SimpleQueue()  # a list would be restored

    def seconds(on) -> float:
        gain = 0.5 * on.last + (0.3 * on.fused if confirming.empty() else -0.6 * on.fused)
        return LATE * (1 - gain)

    search = PlanSearch(step_of(work(seconds)[2]), 20)
    for one in search.run():
        if "proving the best plan: " in one.text:
            confirming.put(True)
    tuning = search.result()
    assert tuning.confirmed
    assert tuning.winner.name == "channels_last"
    assert [name for name, _ in tuning.parts()] == ["channels_last"]
    assert tuning.rejected["channels_last+fused_optimizer"].startswith("not proven: slower")


@pytest.mark.slow
def test_compiling_is_not_tried_with_a_short_budget(work, monkeypatch):
    from speedkit_jupyter.catalog.compile import Compile

    monkeypatch.setattr(Compile, "candidates", lambda self, hardware, facts: (True,))
    tuning = tune(work(lambda on: LATE)[2], budget_s=3)
    why = "compiling takes over 3 s: --budget 30 tries it"
    assert {reason for name, reason in tuning.rejected.items() if "compile" in name} == {why}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget_s": -1}, "positive"),
        *(({"keep": keep}, "keep: no optimization") for keep in ("precison", [3])),
    ],
    ids=str,
)
def test_what_cant_be_meant_is_one_clear_error(work, options, words):
    with pytest.raises(StepError, match=words):
        tune(work(lambda on: 0.0)[2], **options)
    with pytest.raises(StepError, match="no model"):
        tune(lambda: None)


def test_candidates_join_in_the_catalogs_order_one_value_each():
    fused = Candidate({"fused_optimizer": True})
    bf16, fp16 = (Candidate({"precision": dtype}) for dtype in ("bf16", "fp16"))
    assert (fused + bf16).name == "bf16+fused_optimizer"
    assert first_plans([fp16, fused, bf16], False)[0].name == "fp16+fused_optimizer"
    assert (fused + bf16).without("precision").name == "fused_optimizer"
    assert (fused + bf16).part("precision").name == "bf16"
    medium = Candidate({"tf32": "medium"})
    assert (fused + bf16).joined(medium).name == "tf32:medium+fused_optimizer"


def test_a_search_that_is_stopped_leaves_everything_as_before(work):
    network, optimizer, step = work(lambda on: LATE / (1 + on.fused))
    before = [p.detach().clone() for p in network.parameters()]
    search = PlanSearch(step_of(step), budget_s=3)
    run = search.run()
    for _ in range(12):
        next(run)
    run.close()
    assert not search.result().helped
    assert all(map(torch.equal, before, network.parameters()))
    assert not optimizer.state


@pytest.mark.parametrize(("after_s", "is_likely"), [(0.5, False), (5, False), (9, True)])
def test_an_interrupted_search_shows_a_likely_plan_and_applies_it_only_when_asked(
    work, made_time, machine, after_s, is_likely
):
    machine("cpu")  # the search stops at a fixed time, so every machine must try the same plans

    def seconds(on) -> float:
        if made_time.now_s() > after_s:
            raise KeyboardInterrupt
        return 0.2 if on.fused else 0.6

    network, optimizer, step = work(seconds)
    before = [p.detach().clone() for p in network.parameters()]
    with pytest.raises(KeyboardInterrupt) as caught:
        tune(step, model=network, optimizer=optimizer, budget_s=60)
    tuning = caught.value.tuning
    shown = " ".join(repr(tuning).split())
    assert not shown.startswith("Nothing to gain")
    assert "interrupted" in shown
    assert not tuning.confirmed
    assert ("fused_optimizer" in tuning.likely) is is_likely
    assert all(map(torch.equal, before, network.parameters()))
    assert optimizer.param_groups[0]["fused"] is None
    if not is_likely:
        return
    assert shown.startswith(f"Likely: {tuning.likely} is probably about 3.00× as fast")
    with pytest.warns(UserWarning, match=r"nothing is applied; apply\(likely=True\) applies"):
        assert tuning.apply() == []
    assert MEMORY.likely_config([network]).to_dict() == tuning.likely_config.to_dict()
    with pytest.warns(UserWarning, match="likely, not proven: "):
        (context,) = tuning.apply(likely=True)
    assert optimizer.param_groups[0]["fused"] is True
    decision = context.plan["fused_optimizer"]
    assert decision.source == "measured"
    assert "likely, not proven: " in decision.reason
    context.restore()


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"compile": True}, "compile"),
        ({"compile": {"enabled": True, "mode": "default", "fullgraph": False}}, "compile"),
        ({"compile": {"enabled": True, "mode": "reduce-overhead"}}, "compile:reduce-overhead"),
        ({"sdpa": {"backend": "math"}}, "sdpa:math"),
        ({"precision": "bf16", "fused_optimizer": True}, "bf16+fused_optimizer"),
        ({"threads": 1}, "threads:1"),
    ],
)
def test_a_candidates_name_is_the_variants_however_its_values_are_spelled(values, name):
    assert Candidate(values).name == name


@pytest.mark.sampled(5)
@pytest.mark.parametrize("step_s", [0.05, 0.5])
@pytest.mark.parametrize("helps", ["fused", "last", "bf16"])
@pytest.mark.slow
def test_where_a_combination_loses_its_part_that_helps_is_found(monkeypatch, work, step_s, helps):
    """Search with short steps, and with long steps, which leave time for few plans."""
    monkeypatch.setenv("SPEEDKIT_HARDWARE", "cpu_avx512_bf16")

    def seconds(on) -> float:
        return step_s * math.prod(0.5 if n == helps else 2 for n, v in vars(on).items() if v)

    tuning = tune(work(seconds)[2])
    words = {"fused": "fused_optimizer", "last": "channels_last", "bf16": "bf16"}
    assert tuning.winner.name == words[helps]
    assert tuning.confirmed


def test_what_is_to_be_kept_is_not_tried_and_the_plan_without_it_is_found(work):
    search = partial(tune, work(lambda on: LATE / ((1 + on.fused) * (1 + 3 * on.last)))[2])
    tuning = search(budget_s=3, keep="channels_last")
    assert tuning.winner.values == {"fused_optimizer": True}
    assert not any("channels_last" in name for name in tuning.tried.plans)
    assert "Left as they are: channels_last." in repr(tuning)
    assert "channels_last" in search(budget_s=3).winner.values  # searches on after the learned plan


def test_that_nothing_helps_is_not_remembered_if_parts_were_kept(work):
    tuning = tune(work(lambda on: LATE * (1 + on.fused))[2], budget_s=3, keep=["channels_last"])
    assert not tuning.helped
    assert not database.learned()


def test_no_autocast_is_tried_if_the_step_has_its_own(work):
    inner = work(lambda on: LATE / (1 + on.fused))[2]

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            inner()

    tuning = tune(step, budget_s=3)
    assert tuning.winner.values == {"fused_optimizer": True}
    assert not any("bf16" in name for name in tuning.tried.plans)
    assert "its own autocast" in repr(tuning)


def test_a_plan_that_left_a_race_early_is_called_slower_than_the_best():
    records = (Record("baseline", [1.0] * 8), Record("plan", [0.9] * 3))
    said = TimedPlan(Comparison(records, {}, 10.0), records[1]).why_not("another plan")
    assert said.startswith("slower than the best, dropped: about 1.11×")


def records(held_up: int = 0, rounds: int = 3, **seconds: float) -> list[Record]:
    """Return records of these times; delay the first `held_up` rounds by 10 s (fastest: 30 s)."""
    made = []
    for name, each_s in seconds.items():
        waited_s = [10.0 * (at < held_up) for at in range(rounds)]
        is_fast = each_s == min(seconds.values())
        times_s = [each_s + waited * (3 if is_fast else 1) for waited in waited_s]
        made.append(Record(name, times_s, waited_s=waited_s))
    return made


def leaving(racing: list[Record]) -> list[str]:
    return [record.name for record in clearly_slower(racing)]


def test_what_is_a_fifth_behind_leaves_after_three_rounds_and_not_before():
    steps_s = {"baseline": 1.0, "near": 0.5, "best": 0.45, "far": 0.6}
    assert leaving(records(**steps_s)) == ["baseline", "near", "far"]
    assert leaving(records(rounds=2, **steps_s)) == []


def test_rounds_that_others_held_up_drop_nothing_where_there_are_others():
    steps_s = {"baseline": 1.0, "best": 0.5}
    assert leaving(records(held_up=3, rounds=3, **steps_s)) == ["best"]  # every round is delayed
    assert leaving(records(held_up=3, rounds=6, **steps_s)) == ["baseline"]


def test_a_race_goes_on_if_no_round_is_whole():
    racing = [Record(name) for name in ("baseline", "a", "b")]  # the first round was left out
    assert PlanRace(SearchBudget(10.0)).staying(racing, None) == racing
    assert not leaving(racing)


def test_a_race_of_generation_compares_the_limit_with_a_tokens_time(work, monkeypatch):
    def meter(runners, budget):
        for one in runners:
            one.record.tokens = TokenTimes(4, 0.0, LATE / 8, LATE / 8)
        yield from ()

    monkeypatch.setattr("speedkit_jupyter.rounds.benchmark.meters", lambda: [meter])
    tuning = tune(work(lambda on: LATE * (1 + on.fused))[2], budget_s=5, at_most_s=LATE / 4)
    assert {row.above_limit for row in tuning.tried.rows()} == {""}


def test_variations_of_a_compiled_plan_are_tried_if_compiling_is_quick():
    compiled = Candidate({"static_cache": True})
    variation = Candidate({"static_cache": True, "tf32": "medium"})
    tried = TriedPlans()
    assert tried.best_first(compiled, [variation], compiles=False) == []
    assert tried.best_first(compiled, [variation], compiles=True) == [variation]
