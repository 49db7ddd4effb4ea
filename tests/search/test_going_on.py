"""A search that goes on with what an earlier one knows, and a likely plan put into force."""

from __future__ import annotations

import gc

import pytest

from speedkit_jupyter import StepError, tune
from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.from_function import step_of
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.search.candidates import Candidate
from speedkit_jupyter.search.knowledge import SearchState, Stage
from speedkit_jupyter.search.outcome import MEMORY, Tuning
from speedkit_jupyter.search.search import PlanSearch
from speedkit_jupyter.support.exceptions import ArgumentError

pytestmark = pytest.mark.usefixtures("made_time", "trusted")


@pytest.fixture
def fused_s() -> float:
    """The seconds of a step with a fused optimizer, after the first search."""
    return 0.2


@pytest.fixture
def stopped(work, made_time, fused_s, machine):
    """A model, its optimizer, its step, and a search that was stopped while it looked likely."""
    machine("cpu")  # it is stopped at a fixed time, whatever other machines offer to be tried
    stops = [True]

    def seconds(on) -> float:
        if stops and made_time.now_s() > 8:
            raise KeyboardInterrupt
        if on.fused:
            return 0.2 if stops else fused_s
        return 0.4 if on.last else 0.6

    network, optimizer, step = work(seconds)
    with pytest.raises(KeyboardInterrupt) as caught:
        tune(step, model=network, optimizer=optimizer, budget_s=60)
    stops.clear()
    tuning = caught.value.tuning
    assert tuning.likely
    return network, optimizer, step, tuning


def raced(tuning: Tuning) -> list[tuple[str, list[str]]]:
    return [(s.title, [row.name for row in s.comparison.records[1:]]) for s in tuning.stages]


def test_more_proves_the_likeliest_first_and_races_nothing_twice(stopped):
    network, optimizer, step, earlier = stopped
    before = raced(earlier)
    found = tune(step, model=network, optimizer=optimizer, budget_s=60, more=earlier)
    assert raced(found)[: len(before)] == before
    title, names = raced(found)[len(before)]
    assert title == "confirming"
    assert names[0] == earlier.likely
    assert "fused_optimizer" in found.winner.name
    assert raced(earlier) == before
    assert not earlier.helped


@pytest.mark.parametrize("fused_s", [0.9])
def test_where_the_likeliest_does_not_hold_more_goes_on_with_the_next(stopped):
    *_, step, earlier = stopped
    found = tune(step, budget_s=60, more=earlier)
    assert found.winner.name == "channels_last"


def test_more_races_what_was_left_and_nothing_that_is_known(work, machine):
    machine("cpu")
    last, fused = Candidate({"channels_last": True}), Candidate({"fused_optimizer": True})
    known = SearchState(left=[last], tried={plan.name: plan for plan in (fused, last + fused)})
    search = PlanSearch(step_of(work(lambda on: 0.01 * (1 - 0.5 * on.last))[2]), 3.0, known=known)
    for _ in search.run():
        pass
    assert search.result().winner.name == "channels_last"
    assert {name for _, names in raced(search.result()) for name in names} == {"channels_last"}


def test_more_times_first_what_was_named_as_the_best(work, machine):
    machine("cpu")
    step = work(lambda on: 0.01 * (0.4 if on.fused else 0.7 if on.last else 1.0))[2]
    last, fused = Candidate({"channels_last": True}), Candidate({"fused_optimizer": True})
    once = Comparison((Record("baseline", [0.01]), Record(fused.name, [0.004])), {}, 10.0)
    known = SearchState([Stage("", once)], {fused.name: fused}, left=[last])
    search = PlanSearch(step_of(step), 3.0, known=known)
    for _ in search.run():
        pass
    assert raced(search.result())[1][0] == "confirming"
    assert search.result().winner.name == fused.name


def test_more_is_asked_what_the_earlier_search_was_and_may_end_with_the_same_answer(work):
    step = work(lambda on: 0.01 * (1 - 0.5 * on.last))[2]
    earlier = tune(step, budget_s=3, keep="channels_last")
    assert not earlier.helped
    found = tune(step, budget_s=3, more=earlier)
    assert found.kept == ("channels_last",)
    assert raced(found) == raced(earlier)


def test_more_says_what_it_can_not_go_on_with(stopped, work):
    _, _, step, earlier = stopped
    other = work(lambda on: 0.1)[2]
    with pytest.raises(StepError, match="the earlier search was for another model"):
        tune(other, more=earlier)
    with pytest.raises(StepError, match="more goes on as it was asked"):
        tune(step, more=earlier, objective="memory")
    with pytest.raises(ArgumentError, match="more must be a Tuning, not str"):
        tune(step, more="bf16")


def test_apply_takes_what_is_likely_only_when_asked_and_says_so(stopped):
    network, optimizer, _, tuning = stopped
    with pytest.warns(UserWarning, match=r"nothing is applied; apply\(likely=True\) takes"):
        assert tuning.apply() == []
    with pytest.warns(UserWarning, match="likely, not proven: "):
        (context,) = tuning.apply(likely=True)
    assert optimizer.param_groups[0]["fused"] is True
    decision = context.plan["fused_optimizer"]
    assert decision.source == "measured"
    assert "likely, not proven: " in decision.reason
    context.restore()
    assert applied_to(network) is None


def test_the_session_keeps_the_last_search_and_no_model_alive(work):
    network, optimizer, step = work(lambda on: 0.01)
    tune(step, model=network, optimizer=optimizer, budget_s=3)
    search = MEMORY.last
    assert search.is_of([network])
    del network, optimizer, step
    gc.collect()
    assert list(search.models) == []
