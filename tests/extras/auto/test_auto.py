"""Test `auto` on training loops whose simulated step time depends on the plan in force."""

import copy
import gc
import math
import random
import re
import signal
import weakref
from statistics import median
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

import speedkit_jupyter
from speedkit_jupyter.catalog.base import target
from speedkit_jupyter.extras.auto.auto import Auto
from speedkit_jupyter.extras.auto.race import BASELINE
from speedkit_jupyter.extras.auto.raced_loop import RacedLoop
from speedkit_jupyter.extras.auto.report import report, summary
from speedkit_jupyter.machines import flags
from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.plans.registry import is_measuring
from speedkit_jupyter.rounds import busy_machine, clock
from speedkit_jupyter.support.exceptions import ArgumentError

ELSEWHERE: list[torch.Tensor] = []  # results that a user's hook keeps
pytestmark = [pytest.mark.usefixtures("bf16_machine"), pytest.mark.long]


def test_the_faster_plan_wins_and_every_flag_and_object_is_put_back(loop, running):
    net, optimizer, train = loop
    train(300)
    work = running.latest
    assert "bf16" in work.race.leader
    assert work.race.proof.low > 1.2
    lines = running.end_cell()
    assert lines[0].startswith("300 steps in")
    assert "by bf16" in lines[0]
    assert applied_to(net) is not None
    running.end()
    assert applied_to(net) is None
    assert vars(net).get("_compiled_call_impl") is None
    assert not optimizer.param_groups[0]["fused"]
    assert not hasattr(torch.autograd.backward, "stands_in_for")
    assert not hasattr(torch.utils.data.DataLoader.__iter__, "stands_in_for")


def test_an_interrupt_as_auto_ends_waits_until_all_is_put_back(loop, running, monkeypatch):
    net, _, train = loop
    train(300)
    pause = RacedLoop.pause
    ring = lambda work: (signal.raise_signal(signal.SIGINT), pause(work))  # noqa: E731
    monkeypatch.setattr(RacedLoop, "pause", ring)
    with pytest.raises(KeyboardInterrupt):
        running.end()
    assert not running.loops
    assert vars(net).get("_compiled_call_impl") is None


def test_status_and_summary_say_what_decided_in_magics_or_in_functions_of_a_program(loop, running):
    _, _, train = loop
    train(300)
    running.end_cell()
    found = running.latest
    found.race.waiting, found.race.again = ["later", "delayed"], ["delayed"]
    rows = {row.cells[0]: row.cells for row in report(found).sections[1].body.rows}
    assert rows["later"][-1] == "waits for its turn"
    assert rows["delayed"][-1] == "races again: the machine was busy"
    duel = found.race.tried[found.race.leader]
    speedup = f"{median(duel.ratios):.2f}× baseline"
    assert rows[found.race.leader][2:] == (f"{len(duel.pairs)}", speedup, "in force")
    assert "%speedkit code" in summary(found)
    in_program = summary(found, in_notebook=False)
    assert "tuned(model, optimizer)" in in_program
    assert "%" not in in_program.replace(" %", "")


def test_a_busy_machine_is_said_before_any_figure(loop, running, made_time, monkeypatch):
    monkeypatch.setattr(busy_machine, "taken_by_others_s", lambda: made_time.now_s())
    monkeypatch.setattr(busy_machine, "_cores", lambda: 2)
    running.begin_cell()
    loop[2](200)
    told = r"The machine was busy: other programs used (\d+)% of the CPU. 200 steps"
    assert 45 <= int(re.match(told, running.end_cell()[0])[1]) <= 55


def test_every_step_trains_once_on_its_own_batch(loop, running, made_time):
    net, _, train = loop
    twin = copy.deepcopy(net)
    other = torch.optim.SGD(twin.parameters(), 0.01)
    torch.manual_seed(1)
    train(200)
    running.end()
    torch.manual_seed(1)
    for _ in range(200):
        x = torch.rand(4, 8)
        other.zero_grad()
        nn.functional.cross_entropy(twin(x), torch.zeros(4, dtype=torch.long)).backward()
        other.step()
    assert torch.allclose(net.first.weight, twin.first.weight, atol=1e-2)


def test_random_numbers_are_drawn_as_without_it(make_net, running):
    def drawn(auto):
        torch.manual_seed(0)
        net = make_net(dropout=0.5)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(120):
            optimizer.zero_grad()
            net(torch.rand(4, 8)).sum().backward()
            optimizer.step()
        return torch.rand(3)

    with_it = drawn(running)
    running.end()
    assert torch.equal(with_it, drawn(None))


def test_a_plan_that_computes_something_else_never_races(loop, running):
    net, _, train = loop
    net.factor = 3.0
    train(300)
    race = running.latest.race
    assert "bf16" not in race.leader
    assert any("off by" in why or "scaled" in why for why in race.reasons.values())


def test_a_call_that_changes_parameters_is_never_repeated(loop, running):
    net, _, train = loop
    net.steps = steps = nn.Parameter(torch.zeros(1), requires_grad=False)
    net.register_forward_pre_hook(lambda *_: setattr(steps, "data", steps.data + 1))
    train(300)
    assert steps == 300


def test_a_call_that_changes_an_argument_is_never_repeated(make_net, running):
    net, cache = make_net().eval(), np.zeros(1)
    forward = net.forward
    net.forward = lambda x, cache: (cache.__iadd__(1), forward(x))[1]
    with torch.no_grad():
        for _ in range(300):
            net(torch.rand(4, 8), cache)
    assert cache == 300
    assert "changes its arguments" in str(running.latest.race.reasons)


def test_what_calls_change_in_a_models_containers_counts_each_step_once(loop, running):
    net, _, train = loop
    net.drawn, net.own = [], random.Random(0)
    net.inner = {"sums": [torch.zeros(1), np.zeros(())], "hidden": (nn.BatchNorm1d(8),)}

    def count(*_):
        net.drawn.append(net.own.random())
        net.inner["sums"][0] += 1
        net.inner["sums"][1] += 1
        net.inner["hidden"][0](torch.rand(4, 8))

    forward = net.forward
    net.forward = lambda x: (count(), forward(x))[1]
    train(300)
    assert "bf16" in running.latest.race.leader
    counts = *net.inner["sums"], net.inner["hidden"][0].num_batches_tracked
    again = random.Random(0)
    assert net.drawn == [again.random() for _ in range(300)]
    assert [len(net.drawn), *map(int, counts)] == [300] * 4


def test_a_users_own_error_goes_up_and_leaves_no_plan_on_trial(loop, running):
    net, _, train = loop
    train(60)
    running.latest._examiner.begin("bf16")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net(torch.rand(4, 9))
    assert not running.latest._examiner._calls
    running.end_cell()
    work = running.latest
    assert work.plans.in_force in (BASELINE, work.race.leader)


def test_an_error_of_the_users_own_is_raised_under_the_winner_and_repeated_once(loop, running):
    net, _, train = loop
    train(600)
    assert running.latest.plans.is_applied
    calls = []
    given, own = net.drop.forward, lambda x: calls.append(1) or {}["enough"]
    net.drop.forward = own
    for _ in range(3):
        with pytest.raises(KeyError, match="enough"):
            train(1)
    net.drop.forward = given
    assert len(calls) == 4
    train(3)
    assert "bf16" in running.latest.plans.in_force


def test_evaluation_runs_plainly_while_plans_race_and_under_the_winner_afterwards(loop, running):
    net, _, train = loop
    seen, first = [], net.first.forward
    now = lambda: None if net.training else seen.append(torch.is_autocast_enabled("cpu"))  # noqa: E731
    net.first.forward = lambda x: (now(), first(x))[1]

    def evaluate():
        net.eval()
        with torch.no_grad():
            net(torch.rand(4, 8))
        net.train()

    for _ in range(20):
        train(4)
        evaluate()
    racing, settled = [*seen], running.latest.race.is_settled
    assert not settled
    assert racing == [False] * 20
    train(600)
    evaluate()
    assert seen[-1]
    assert "evaluation" in running.end_cell()[0]


def test_exact_evaluation_is_plain_and_seeks_no_optimizers_at_each_call(loop, monkeypatch):
    net, _, train = loop
    search, x = Mock(side_effect=target._optimizers_of_the_process), torch.rand(4, 8)
    monkeypatch.setattr(target, "_optimizers_of_the_process", search)
    with speedkit_jupyter.auto(evaluation="exact", say=lambda line: None) as running:
        train(600)
        assert running.latest.plans.is_applied
        search.reset_mock()
        for _ in range(10):
            net(x).sum().backward()  # a last backward pass without a step
            net.eval()
            with torch.no_grad():
                result = net(x)
            assert running.latest.plans.in_force == BASELINE
            assert result.dtype == torch.float32
            net.train()
            train(3)
        with torch.no_grad():
            expected = net(x)
        assert running.latest.plans.in_force == BASELINE
        assert search.call_count <= 1
        assert "evaluation" not in running.end_cell()[0]
    with torch.no_grad():
        assert net(x).equal(expected)


def test_calls_without_gradients_within_a_step_are_no_part_of_its_kind(loop, running):
    net, optimizer, _ = loop
    for _ in range(700):
        x = torch.rand(4, 8)
        loss = nn.functional.cross_entropy(net(x), torch.zeros(4, dtype=torch.long))
        with torch.no_grad():
            net(x)
        loss.backward()
        optimizer.step()
    assert "bf16" in running.latest.race.leader


@pytest.mark.parametrize("evaluation", ["plan", "exact"])
def test_loops_are_found_after_an_evaluation(loop, make_net, evaluation):
    net, _, train = loop
    other = make_net()
    optimizer = torch.optim.SGD(other.parameters(), 0.01)
    with speedkit_jupyter.auto(evaluation=evaluation, say=lambda line: None) as running:
        for number in (50, 600):
            train(number)
            with torch.no_grad():
                net(torch.rand(4, 8))
        train(300)
        assert running.latest.plans.is_applied
        for _ in range(10):
            other(torch.rand(4, 8)).sum().backward()
            optimizer.step()
        assert len(running.loops) == 2


def test_a_new_optimizer_of_a_model_begins_a_new_loop_in_the_place_of_the_old_one(loop, running):
    net, _, train = loop
    train(60)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for known in running.loops:
        known.plans.optimizers.clear()  # as if the old optimizer had been deleted
    for _ in range(10):
        net(torch.rand(4, 8)).sum().backward()
        optimizer.step()
    assert [[*one.plans.optimizers] for one in running.loops] == [[optimizer]]


@pytest.mark.parametrize("is_watched", [True, False])
def test_many_calls_of_a_step_without_a_plan_pass_and_are_counted_if_it_is_watched(
    loop, running, monkeypatch, is_watched
):
    net, optimizer, train = loop
    train(4)
    work, seen, x = running.latest, [], torch.rand(4, 8)
    (beat,), call = work._beats, work._call
    monkeypatch.setattr(beat, "_made", lambda *given: seen.append(1) or call(*given))
    work.race.waiting.clear()
    work.race.pause()
    for calls in (3, 5):
        seen.clear()
        work._watched_s = -math.inf if is_watched else clock.now()
        sum(net(x).sum() for _ in range(calls)).backward()
        assert len(seen) == 1
        assert work._calls + beat._passed == (calls if is_watched else 1)
        assert (net._compiled_call_impl is beat) == is_watched
        optimizer.step()
        assert net._compiled_call_impl is beat
    net(x)  # a step begins, and the user applies a plan within it
    config = speedkit_jupyter.SpeedConfig(precision="bf16")
    _, context = speedkit_jupyter.apply_speedups(net, config, optimizer=optimizer)
    running.end()
    context.restore()
    assert "_compiled_call_impl" not in vars(net)


def test_a_second_loop_of_a_model_ends_the_first_and_leaves_nothing_on_it(make_net, running):
    net = make_net()
    optimizers = [torch.optim.SGD(net.parameters(), 0.01) for _ in range(2)]
    for number in range(200):
        net(torch.rand(4, 8)).square().mean().backward()
        optimizers[number // 20 % 2].step()
    assert [[*one.plans.optimizers] for one in running.loops] == [[optimizers[1]]]
    running.end()
    assert not is_measuring()
    assert "_compiled_call_impl" not in vars(net)


def test_two_optimizers_that_alternate_make_one_step(make_net, running):
    first, second = make_net(), make_net()
    optimizers = [torch.optim.SGD(net.parameters(), 0.01) for net in (first, second)]
    for _ in range(40):
        for net, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            net(torch.rand(4, 8)).sum().backward()
            optimizer.step()
    work = running.latest
    assert len(running.loops) == 1
    assert len(work.plans.live_models) == 2
    assert sum(work.totals.steps.values()) == 40


def test_accumulated_gradients_belong_to_their_step(loop, running):
    net, optimizer, _ = loop
    for number in range(160):
        net(torch.rand(4, 8)).square().mean().backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    assert sum(running.latest.totals.steps.values()) == 40


def test_loops_with_ever_new_optimizers_are_left_alone_and_one_line_says_so(loop, running):
    net, *_ = loop
    for _ in range(40):
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(5):
            net(torch.rand(4, 8)).sum().backward()
            optimizer.step()
    assert "new optimizers come too often" in running.end_cell()[-1]


def test_short_steps_are_all_counted_also_when_the_cell_ends(loop, running, made_time):
    net, optimizer, _ = loop
    net.forward = lambda x: (made_time.sleep(0.001), net.last(net.first(x)))[1]
    begun_s, made_time.tick_s = made_time.now_s(), 1e-5
    for _ in range(333):
        for _ in range(2):  # two backward passes for each step
            net(torch.rand(4, 8)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            net(torch.rand(4, 8))  # evaluation
    took_s, work = made_time.now_s() - begun_s, running.latest
    made_time.sleep(100)  # other work of the cell
    running.end_cell()
    assert sum(work.totals.steps.values()) == len(work.log) + 3 == 333
    assert sum(work.totals.seconds.values()) == pytest.approx(2 * took_s / 3, rel=0.1)


def test_batches_of_two_shapes_are_compared_with_their_like(loop, running):
    _, _, train = loop
    train(300, shapes=(4, 2))
    assert "bf16" in running.latest.race.leader


def test_the_next_run_begins_with_the_plan_that_was_proven(loop, running):
    _, _, train = loop
    train(600)
    assert running.latest.plans.is_applied
    running.end_cell()
    running.begin_cell()
    train(3)
    assert set(running.latest.totals.steps) == {running.latest.race.leader}
    running.end()
    again = Auto()
    again.begin()
    again.begin_cell()
    train(12)
    assert again.latest.race.is_settled
    assert "bf16" in again.latest.plans.in_force
    again.end()


def test_a_model_that_predicts_races_by_its_calls_and_its_modules_keep_no_hooks(make_net, running):
    net = make_net().eval()
    with torch.no_grad():
        for _ in range(500):
            net(torch.rand(4, 8))
    assert "bf16" in running.latest.race.leader
    assert not modules._has_any_global_hook()
    net(torch.rand(4, 8, requires_grad=True))  # the race compared no gradients
    assert running.latest.plans.in_force == BASELINE


def test_in_the_next_cell_the_modules_of_a_known_loop_keep_no_hooks(loop, running):
    loop[2](50)
    running.end_cell()
    running.begin_cell()
    assert modules._has_any_global_hook()  # another loop may begin
    loop[2](50)
    assert not modules._has_any_global_hook()


def test_a_plan_of_the_users_own_is_the_baseline(loop, running):
    net, optimizer, train = loop
    config = speedkit_jupyter.SpeedConfig(precision="bf16").alone()
    _, context = speedkit_jupyter.apply_speedups(net, config, optimizer=optimizer)
    train(300)
    assert running.latest.race.usual_s(((((4, 8),)), 1), BASELINE) < 0.018
    running.end()
    assert applied_to(net) is context
    assert context.active
    context.restore()


def test_only_the_loops_of_a_given_model_race(loop):
    net, optimizer, train = loop
    other = nn.Linear(2, 2)
    for given in ((net, optimizer), (net,), (other,), (None, torch.optim.SGD(other.parameters()))):
        with speedkit_jupyter.auto(*given) as running:
            train(20)
            assert bool(running.loops) == (given[0] is net)


@pytest.mark.parametrize(
    "options", [{"model": 3}, {"overhead": 2}, {"overhead": "2"}, {"evaluation": "yes"}]
)
def test_wrong_arguments_are_refused_in_one_line(options):
    with pytest.raises(ArgumentError), speedkit_jupyter.auto(**options):
        pass


def test_a_block_in_a_program_says_its_line_puts_back_and_is_the_block_inside_of_it(loop):
    net, _, train = loop
    lines = []
    with speedkit_jupyter.auto(say=lines.append) as outer:
        with speedkit_jupyter.auto() as inner:
            train(300)
        assert inner is outer
    assert "300 steps" in lines[0]
    assert applied_to(net) is None
    assert vars(net).get("_compiled_call_impl") is None
    assert not hasattr(torch.autograd.backward, "stands_in_for")


def test_a_winner_whose_model_is_gone_leaves_nothing_in_force(make_net, running):
    before, net = flags.snapshot(), make_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    while running.latest is None or running.latest.race.proof is None:
        net(torch.rand(4, 8)).sum().backward()
        optimizer.step()
    running.latest.plans.force(BASELINE)  # a plan on trial would keep the model alive
    del net, optimizer
    gc.collect()
    running.end_cell()
    assert running.latest.plans.in_force == BASELINE
    assert flags.snapshot() == before


def test_a_model_is_freed_after_the_block(make_net):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with speedkit_jupyter.auto(say=lambda line: None):
        for _ in range(120):
            net(torch.rand(4, 8)).sum().backward()
            optimizer.step()
    gone = weakref.ref(net)
    del net, optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(("keep", "told"), [
    (lambda net, result: setattr(net, "kept", result), "the model keeps kept"),
    (lambda net, result: net.last.features.append(result), "the model keeps last.features"),
    (lambda net, result: ELSEWHERE.append(result), "your hook of `last` may keep a result"),
], ids=["attribute", "list", "elsewhere"])  # fmt: skip
def test_a_model_or_a_hook_that_keeps_results_is_not_lowered(loop, running, keep, told):
    net, _, train = loop
    net.last.features = []
    net.last.register_forward_hook(lambda module, args, result: keep(net, result))
    train(300)
    kept = [getattr(net, "kept", None), *net.last.features, *ELSEWHERE]
    assert {one.dtype for one in kept[-200:] if one is not None} == {torch.float32}
    assert "bf16" not in running.latest.race.leader
    assert any(told in why for why in running.latest.race.reasons.values())


def test_the_model_of_the_next_fold_begins_with_the_winner_of_the_last(make_net, running):
    for is_next in (False, True):
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(120):
            optimizer.zero_grad()
            net(torch.rand(4, 8)).square().mean().backward()
            optimizer.step()
        assert bool(running.latest.plans.learned) == is_next


class Queue(nn.Linear):  # multiplies its result by a mean of earlier results, like MoCo
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result, before = super().forward(x), self.queue.clone()
        self.queue.mul_(0.5).add_(result.detach())
        return result @ before.T


def test_a_call_is_repeated_from_the_state_before_its_step(running):
    (net := Queue(16, 16)).register_buffer("queue", torch.rand(16, 16))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for _ in range(300):
        net(torch.randn(16, 16)).square().mean().backward()
        optimizer.step()
    assert not any("off by" in why for why in running.latest.race.reasons.values())


def test_gradients_that_are_undefined_or_differentiated_again_are_not_compared(running):
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for _ in range(400):
        x = torch.rand(8, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        optimizer.step()
    assert "gradients are differentiated again" in running.latest.race.reasons["bf16"]


def test_a_hook_that_is_set_under_the_winner_gets_plain_results(loop, running):
    net, _, train = loop
    train(600)
    assert "bf16" in running.latest.plans.in_force
    seen = []
    net.last.register_forward_hook(lambda module, args, result: seen.append(result.dtype))
    train(3)
    assert {*seen} == {torch.float32}


def test_a_plan_whose_repeated_call_takes_long_is_out_and_the_next_examination_waits(loop, running):
    net, _, train = loop
    net.lowered_s = 5.0
    train(300)
    race = running.latest.race
    assert "takes longer than 10 steps" in str(race.reasons)
    assert 5.0 <= race.lost_s < 6.0
    assert not running.latest.totals.steps["bf16+fused_optimizer"]


def test_code_that_the_user_compiles_is_not_disturbed(running):
    net = nn.Linear(4, 2)
    compiled, x = torch.compile(net, backend="eager", fullgraph=True), torch.rand(3, 4)
    assert torch.equal(compiled(x), nn.functional.linear(x, net.weight, net.bias))
    compiled(x).sum().backward()
    assert net.weight.grad is not None
    torch._dynamo.reset()


def test_a_precision_that_the_user_applies_meanwhile_stays(loop, running):
    net, optimizer, train = loop
    train(600)
    config = speedkit_jupyter.SpeedConfig(precision="fp32").alone()
    speedkit_jupyter.apply_speedups(net, config, optimizer=optimizer)
    seen = []
    net.first.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    train(200)
    assert not any(seen[2:])
    speedkit_jupyter.restore_all()


def test_a_script_that_is_not_there_is_one_line(monkeypatch, capsys):
    from speedkit_jupyter.__main__ import main

    monkeypatch.setattr("sys.argv", ["speedkit_jupyter", "run", "nowhere.py"])
    assert main() == 2
    assert capsys.readouterr().err == "nowhere.py: there is no such file\n"


def test_a_script_has_its_own_path_and_traceback(tmp_path, monkeypatch, capsys):
    from speedkit_jupyter.__main__ import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(__file__)\n1 / 0\n", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["speedkit_jupyter", "run", "train.py"])
    assert main() == 1
    shown = capsys.readouterr()
    assert shown.out.strip() == str(tmp_path / "train.py")
    assert shown.err.count("File ") == 1
