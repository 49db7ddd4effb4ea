"""The search: what it finds, confirms, refuses and leaves behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import StepError, tune
from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.support import database
from speedkit_jupyter.tuning.candidates import Candidate, strongest
from speedkit_jupyter.tuning.search import Search

pytestmark = pytest.mark.usefixtures("trusted")

LATE = 0.008  # seconds of a slow step, on the tests' own clock


def parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """A network for which two cheap changes are offered, its optimizer and its batch."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    return network, torch.optim.AdamW(network.parameters()), torch.rand(2, 3, 8, 8)


@pytest.fixture
def sleeping(made_time) -> Callable[..., Callable[[], None]]:
    """`sleeping(network, optimizer, x, seconds)`: a step that takes `seconds(fused, last)`."""
    return partial(_sleeping, made_time)


def _sleeping(
    made: Any,
    network: nn.Module,
    optimizer: Any,
    x: torch.Tensor,
    seconds: Callable[[bool, bool], float],
) -> Callable[[], None]:
    def step() -> None:
        fused = bool(optimizer.param_groups[0]["fused"])
        made.sleep(seconds(fused, network[0].weight.stride()[1] == 1))
        network(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.checked
def test_what_helps_is_found_confirmed_and_applied_as_measured(sleeping):
    network, optimizer, x = parts()
    before = [p.detach().clone() for p in network.parameters()]
    step = sleeping(network, optimizer, x, lambda fused, last: LATE if not fused else LATE / 4)
    tuning = tune(step, budget_s=3)
    assert tuning.winner.values == {"fused_optimizer": True} or "fused" in tuning.winner.name
    assert tuning.comparison.verdict(tuning.comparison.records[1]) == "faster"
    assert all(map(torch.equal, before, network.parameters()))
    assert optimizer.param_groups[0]["fused"] is None
    (context,) = tuning.apply()
    assert optimizer.param_groups[0]["fused"] is True
    assert context.plan["fused_optimizer"].source == "measured"
    assert not context.plan["threads"].active
    context.restore()
    assert "confirmed in fresh rounds" in " ".join(repr(tuning).split())


def test_where_nothing_helps_the_answer_is_to_leave_it(sleeping):
    network, optimizer, x = parts()
    tuning = tune(
        sleeping(network, optimizer, x, lambda fused, last: LATE * (1 + fused + last)), budget_s=10
    )
    assert not tuning.helped
    assert tuning.apply() == []
    assert "Leave it as it is" in repr(tuning)
    reasons = {one.name: one.reason for one in tuning.rejected}
    for name in ("fused_optimizer", "channels_last"):
        assert reasons[name].startswith(("slower", "not proven, too few rounds"))


def test_two_that_help_alone_and_hurt_together_are_not_joined(sleeping):
    network, optimizer, x = parts()

    def seconds(fused: bool, last: bool) -> float:
        return {(0, 0): LATE, (1, 0): LATE / 4, (0, 1): LATE / 2, (1, 1): 2 * LATE}[fused, last]

    tuning = tune(sleeping(network, optimizer, x, seconds), budget_s=3)
    assert tuning.winner.name == "fused_optimizer"
    reasons = {one.name: one.reason for one in tuning.rejected}
    assert reasons["channels_last+fused_optimizer"].startswith("slower: ")


@pytest.mark.checked
def test_what_is_wrong_is_never_chosen_however_fast(made_time):
    network, optimizer, x = parts()

    def step() -> None:
        fused = bool(optimizer.param_groups[0]["fused"])
        made_time.sleep(LATE / 8 if fused else LATE)
        (network(x).sum() * (1.1 if fused else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    tuning = tune(step, budget_s=3)
    assert "fused" not in tuning.winner.name
    assert any("wrong: loss off by 0.1" in one.reason for one in tuning.rejected)


@pytest.mark.slow
def test_what_fresh_rounds_do_not_confirm_leaves_the_parts_that_they_do(sleeping):
    network, optimizer, x = parts()
    confirming: list[bool] = []

    def seconds(fused: bool, last: bool) -> float:
        gain = 0.5 * last + (0.3 * fused if not confirming else -0.6 * fused)
        return LATE * (1 - gain)

    search = Search(step_of(sleeping(network, optimizer, x, seconds)), 20)
    for one in search.run():
        if one.text.startswith("confirming"):
            confirming.append(True)
    tuning = search.result()
    assert tuning.confirmed
    assert tuning.winner.name == "channels_last"
    assert [name for name, _ in tuning.parts()] == ["channels_last"]
    (reason,) = [o.reason for o in tuning.rejected if o.name == "channels_last+fused_optimizer"]
    assert reason.startswith("fresh rounds did not confirm it: slower")


def test_a_search_that_is_stopped_leaves_everything_as_before(sleeping):
    network, optimizer, x = parts()
    before = [p.detach().clone() for p in network.parameters()]
    step = sleeping(network, optimizer, x, lambda fused, last: LATE / (1 + fused))
    search = Search(step_of(step), budget_s=3)
    run = search.run()
    for _ in range(12):
        next(run)
    run.close()
    assert not search.result().helped
    assert all(map(torch.equal, before, network.parameters()))
    assert not optimizer.state


@pytest.mark.slow
def test_compiling_is_not_tried_where_the_steps_do_not_pay_for_it(sleeping, monkeypatch):
    from speedkit_jupyter.optimizations.compile import Compile

    monkeypatch.setattr(Compile, "candidates", lambda self, hardware, facts: (True,))
    network, optimizer, x = parts()
    step = sleeping(network, optimizer, x, lambda fused, last: LATE)
    tuning = tune(step, budget_s=3, steps=10)
    reasons = {one.reason for one in tuning.rejected if "compile" in one.name}
    assert reasons == {"10 steps take 0.1 s, compiling alone takes longer"}
    tuning = tune(step, budget_s=3)
    reasons = {one.reason for one in tuning.rejected if "compile" in one.name}
    assert reasons == {"3 s are less than what compiling takes: --budget 30 tries it"}


def test_bad_wishes_are_one_clear_error(sleeping):
    network, optimizer, x = parts()
    step = sleeping(network, optimizer, x, lambda fused, last: 0.0)
    with pytest.raises(StepError, match="'speed'"):
        tune(step, objective="speed")
    with pytest.raises(StepError, match="1 or more"):
        tune(step, steps=0)
    with pytest.raises(StepError, match="positive"):
        tune(step, budget_s=-1)
    with pytest.raises(StepError, match="no model"):
        tune(lambda: None)


@pytest.mark.slow
def test_a_learned_plan_that_no_longer_holds_gives_way_to_what_does(sleeping):
    network, optimizer, x = parts()
    tune(sleeping(network, optimizer, x, lambda fused, last: LATE / (1 + fused)), budget_s=3)
    step = sleeping(network, optimizer, x, lambda fused, last: LATE * (1 + fused) / (1 + last))
    tuning = tune(step, budget_s=3)
    assert tuning.learned is None
    assert tuning.winner.name == "channels_last"


def test_candidates_join_in_the_catalogs_order_one_value_each():
    fused, bf16, fp16 = (
        Candidate({"fused_optimizer": True}),
        Candidate({"precision": "bf16"}),
        Candidate({"precision": "fp16"}),
    )
    assert (fused + bf16).name == "bf16+fused_optimizer"
    assert strongest([fp16, fused, bf16]).name == "fp16+fused_optimizer"
    assert (fused + bf16).without("precision").name == "fused_optimizer"
    assert (fused + bf16).part("precision").name == "bf16"


def test_an_interrupted_search_ends_with_what_is_likely(
    sleeping,
):
    network, optimizer, x = parts()
    before = [p.detach().clone() for p in network.parameters()]
    step = sleeping(network, optimizer, x, lambda fused, last: LATE / (1 + 3 * fused))

    def interrupted() -> None:
        if "confirming" in stage:
            raise KeyboardInterrupt
        step()

    stage = ""

    def drain(search: Search) -> None:
        nonlocal stage
        for one in search.run():
            stage = one.text

    search = Search(step_of(interrupted, network, optimizer), budget_s=3)
    with pytest.raises(KeyboardInterrupt):
        drain(search)
    tuning = search.result()
    assert tuning.likely == "fused_optimizer"
    assert not tuning.confirmed
    assert repr(tuning).startswith("Likely: fused_optimizer is probably about")
    assert "interrupted" in tuning.unclear
    assert all(map(torch.equal, before, network.parameters()))
    assert optimizer.param_groups[0]["fused"] is None


def test_what_is_far_slower_is_not_even_taken_into_the_rounds(sleeping):
    network, optimizer, x = parts()
    tuning = tune(
        sleeping(network, optimizer, x, lambda fused, last: LATE * (1 + 9 * last - 0.5 * fused)),
        budget_s=3,
    )
    reasons = {one.name: one.reason for one in tuning.rejected if "channels_last" in one.name}
    tried = [why for why in reasons.values() if why.startswith("far slower than baseline: ")]
    assert tried
    assert len(tried) == len(reasons)
    assert "channels_last" not in tuning.winner.values
    assert tuning.winner.values["fused_optimizer"] is True


@pytest.mark.slow
def test_with_steps_the_total_is_what_counts_and_what_is_said(sleeping):
    network, optimizer, x = parts()
    step = sleeping(network, optimizer, x, lambda fused, last: LATE / (1 + fused))
    tuning = tune(step, budget_s=3, steps=1000)
    assert tuning.steps == 1000
    shown = " ".join(repr(tuning).split())
    assert "1,000 steps take 4.0" in shown
    assert "in place of 8.0" in shown


def test_with_memory_as_the_objective_the_bytes_are_said(made_time, machine):
    machine("cpu")
    torch.manual_seed(0)
    network = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(network.parameters())
    x = torch.rand(64, 512)

    def step() -> None:
        made_time.sleep(LATE)
        scratch = None if optimizer.param_groups[0]["fused"] else x.repeat(40, 1)
        network(x).mean().backward()
        del scratch
        optimizer.step()
        optimizer.zero_grad()

    tuning = tune(step, model=network, optimizer=optimizer, budget_s=15, objective="memory")
    assert tuning.winner.name == "fused_optimizer"
    assert "in place of" in " ".join(repr(tuning).split())


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


@pytest.mark.sampled(11)
@pytest.mark.parametrize("step_s", [0.05, 0.5, 1.5])
@pytest.mark.parametrize("helps", ["fused_optimizer", "channels_last", "bf16"])
@pytest.mark.slow
def test_where_the_strongest_combination_loses_a_part_that_helps_alone_is_found(
    monkeypatch, made_time, step_s, helps
):
    """With long steps too, where there is time for few plans."""
    monkeypatch.setenv("SPEEDKIT_HARDWARE", "cpu_avx512_bf16")
    network, optimizer, x = parts()

    def step() -> None:
        on = {
            "fused_optimizer": bool(optimizer.param_groups[0]["fused"]),
            "channels_last": network[0].weight.stride()[1] == 1,
            "bf16": torch.is_autocast_enabled("cpu"),
        }
        made_time.sleep(step_s * math.prod(0.5 if n == helps else 2 for n, v in on.items() if v))
        network(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    tuning = tune(step)
    assert tuning.winner.name == helps
    assert tuning.confirmed


def test_what_is_to_be_kept_is_not_tried_and_the_plan_without_it_is_found(sleeping):
    network, optimizer, x = parts()
    seconds = lambda fused, last: LATE / ((1 + fused) * (1 + 3 * last))  # noqa: E731
    tuning = tune(sleeping(network, optimizer, x, seconds), budget_s=3, keep="channels_last")
    assert tuning.winner.values == {"fused_optimizer": True}
    every = {record.name for stage in tuning.stages for record in stage.comparison.records}
    assert not any("channels_last" in name for name in every)
    assert "Left as they are, as asked: channels_last." in repr(tuning)
    free = tune(sleeping(network, optimizer, x, seconds), budget_s=3)
    assert "channels_last" in free.winner.values  # what was learned under a wish is not all


def test_that_nothing_helps_beside_what_is_kept_is_not_remembered(sleeping):
    network, optimizer, x = parts()
    step = sleeping(network, optimizer, x, lambda fused, last: LATE * (1 + fused))
    tuning = tune(step, budget_s=3, keep=["channels_last"])
    assert not tuning.helped
    assert not database.learned()


@pytest.mark.parametrize("after_s", [0.5, 5, 20])
def test_an_interrupted_search_shows_what_is_known_with_its_number(made_time, after_s):
    network, optimizer, x = parts()

    def step() -> None:
        if made_time.now_s() > after_s:
            raise KeyboardInterrupt
        made_time.sleep(0.2 if optimizer.param_groups[0]["fused"] else 0.6)
        network(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(KeyboardInterrupt) as caught:
        tune(step, model=network, optimizer=optimizer, budget_s=60)
    shown = " ".join(repr(caught.value.tuning).split())
    assert not shown.startswith("Leave it as it is")
    assert "interrupted" in shown
    timed = [record for stage in caught.value.tuning.stages for record in stage.comparison.records]
    if any(record.times_s for record in timed[1:]):
        assert "3.00×" in shown


@pytest.mark.parametrize("keep", ["precison", ["tf32", "fast"], [3]])
def test_an_unknown_name_to_keep_is_one_line(keep):
    network, _, x = parts()
    with pytest.raises(StepError, match="keep: there is no optimization"):
        tune(lambda: network(x), budget_s=1, keep=keep)
