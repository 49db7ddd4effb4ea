"""Test that `auto` drops a plan whose losses, gradient norms, memory or times go wrong."""

import math

import pytest
import torch
from torch import nn

from speedkit_jupyter.extras.auto import run_watch
from speedkit_jupyter.extras.auto.race import BASELINE
from speedkit_jupyter.extras.auto.run_watch import Memory, RunWatch, Signal, gradient_norm
from speedkit_jupyter.plans.applying import applied_to

MIB = 2**20


def signal(may_overflow: bool = False) -> Signal:
    watched = Signal("loss", 3.0, 0.1, may_overflow)
    for value in (1.0, 1.1, 0.9):
        assert not watched.noted(BASELINE, value)
    return watched


def test_a_value_above_the_plain_ones_counts_three_times_in_a_row():
    watched = signal()
    found = [watched.noted("plan", value) for value in (9.0, 9.0, 1.0, 9.0, 9.0, 9.0)]
    assert [bool(why) for why in found] == [False] * 5 + [True]
    assert found[-1] == "its loss was 9 where plain steps had at most 1.1"
    assert not signal().noted("plan", -50.0)


def test_the_noise_of_a_loss_that_has_converged_does_not_count():
    watched = signal()
    for value in (1e-6, 2e-6):
        assert not [why for _ in range(20) if (why := watched.noted(BASELINE, value))]
    assert not any(watched.noted("plan", 1e-2) for _ in range(9))
    assert any(watched.noted("plan", 0.1) for _ in range(9))


def test_a_value_that_is_no_number_counts_at_once_unless_fp16_skips_the_step():
    assert signal().noted("plan", math.nan)
    assert Signal("loss", 3.0, 0.1, may_overflow=False).noted("plan", math.nan)  # no plain steps
    assert not signal(may_overflow=True).noted("plan", math.inf)


def test_memory_that_grows_at_every_reading_of_a_plan_is_a_leak():
    memory = Memory()
    found = [memory.noted("plan", number * MIB) for number in range(run_watch.GROWTHS + 1)]
    assert [bool(why) for why in found] == [False] * run_watch.GROWTHS + [True]
    assert "20 MiB" in found[-1]


@pytest.mark.parametrize("plan_mib", [1.0, 1.5])
def test_memory_that_grows_in_plain_steps_as_well_is_the_users(plan_mib):
    memory, used = Memory(), 0
    for plan, grown in ((BASELINE, 1.0), ("plan", plan_mib)):
        for _ in range(100):
            used += int(grown * MIB)
            assert not memory.noted(plan, used)


def test_memory_that_a_plan_takes_once_is_no_leak():
    memory = Memory()
    for number in range(100):
        assert not memory.noted("plan", MIB * (500 + min(number, 10)))


def test_values_are_read_every_few_steps_and_not_at_once():
    watch = RunWatch()
    net = nn.Linear(2, 1)
    net(torch.ones(2)).backward()
    given = [torch.optim.SGD(net.parameters())], torch.device("cpu")
    read = [watch.signals("plan", 0.001 * number, *given)[0] for number in range(1000)]
    assert sum(one is not None for one in read) == 5


def test_the_norm_is_of_all_gradients_and_sparse_ones_are_left_out():
    net, table = nn.Linear(2, 1, bias=False), nn.Embedding(4, 2, sparse=True)
    assert gradient_norm([torch.optim.SGD(net.parameters())]) is None
    (net(table(torch.tensor([1]))).sum() * 2).backward()
    optimizers = [torch.optim.SGD(one.parameters()) for one in (net, table)]
    assert gradient_norm(optimizers) == pytest.approx(net.weight.grad.norm().item())


def test_a_plan_that_leaks_is_dropped_and_said(loop, running, monkeypatch):
    net, _, train = loop
    used = [0]

    def reading(device):
        used[0] += MIB * torch.is_autocast_enabled("cpu") or MIB * (applied_to(net) is not None)
        return used[0]

    monkeypatch.setattr(run_watch, "used_bytes", reading)
    train(1200)
    assert applied_to(net) is None
    assert "memory grew" in running.lines[-1]
    assert any("memory grew" in why for why in running.latest.race.reasons.values())


def test_a_plan_whose_gradients_explode_is_dropped_and_said(loop, running, monkeypatch):
    _, _, train = loop
    train(250)
    assert "bf16" in running.latest.race.leader
    norm = run_watch.gradient_norm
    monkeypatch.setattr(run_watch, "gradient_norm", lambda given: norm(given) * 1000)
    train(60)
    assert "gradient norm" in running.lines[-1]


def test_the_time_between_cells_is_not_of_the_run(loop, running, made_time):
    _, _, train = loop
    train(60)
    before_s = running.latest.race.elapsed_s
    running.end_cell()
    made_time.sleep(1000.0)
    running.begin_cell()
    train(60)
    assert before_s < running.latest.race.elapsed_s < 10.0


def fails(net):
    net.drop.register_forward_pre_hook(
        lambda *_: 1 / 0 if torch.is_autocast_enabled("cpu") else None
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda net: setattr(net, "factor", 30.0), "its loss was"),
        (lambda net: setattr(net, "factor", math.nan), "its loss was nan"),
        (lambda net: setattr(net, "lowered_s", 0.2), "times slower"),
        (fails, "division by zero"),
    ],
)
@pytest.mark.parametrize("has_won", [False, True])
def test_a_plan_that_does_harm_later_is_dropped_for_good(loop, running, harm, reason, has_won):
    net, optimizer, train = loop
    optimizer.param_groups[0]["lr"] = 0.0
    with torch.no_grad():
        net.last.bias += torch.tensor([-1.0, 1.0])
    train(250 if has_won else 20)
    while not has_won and "bf16" not in getattr(running.latest.race.duel, "rival", ""):
        train(1)
    harm(net)
    train(300)
    work = running.latest
    assert {name: why for name, why in work.race.reasons.items() if reason in why}
    assert "bf16" not in work.race.leader
    lowered = []
    net.first.register_forward_hook(lambda *_: lowered.append(torch.is_autocast_enabled("cpu")))
    running.end_cell()
    running.begin_cell()
    train(40)
    assert not any(lowered)
    running.end()
    running.begin()
    running.begin_cell()
    train(5)
    assert "bf16" not in running.latest.race.leader  # the next run doesn't begin with it


@pytest.mark.parametrize("bad", [1000.0, float("nan")])
def test_a_stored_plan_is_compared_with_its_own_first_steps_where_plain_steps_are_few(bad):
    watch, loss = RunWatch(), torch.tensor(1.0)
    assert not any(watch.values("bf16", loss, None) for _ in range(30))
    found = [watch.values("bf16", loss * bad, None) for _ in range(3)]
    assert "where its first steps had at most 1" in found[-1]
