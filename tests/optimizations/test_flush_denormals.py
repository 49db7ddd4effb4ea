"""flush_denormals: the smallest numbers taken for zero, in this thread and its helpers."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from speedkit_jupyter import (
    Facts,
    SpeedConfig,
    apply_speedups,
    benchmark,
    code,
    plan,
    restore_all,
)
from speedkit_jupyter.machines import denormals, flags
from speedkit_jupyter.optimizations.facts.denormal_numbers import share

TINY = 1e-310
ON, OFF = SpeedConfig(flush_denormals=True).alone(), SpeedConfig(flush_denormals=False).alone()


def shares_of_zeros(parts: int = 2) -> list[float]:
    """Of a product of denormal numbers, for each stretch of it that one thread computes."""
    product = torch.full((1 << 17,), TINY, dtype=torch.float64) * 1.0
    bits = product.numpy().view(np.int64)  # whole numbers: no thread takes these for zero
    return [float((part == 0).mean()) for part in np.array_split(bits, parts)]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Of which the second is there, and has nothing set."""
    found = torch.get_num_threads()
    torch.set_num_threads(2)
    assert shares_of_zeros() == [0.0, 0.0]
    yield
    torch.set_flush_denormal(False)
    assert shares_of_zeros() == [0.0, 0.0]
    torch.set_num_threads(found)


def applied(config: SpeedConfig = ON, model: nn.Module | None = None) -> Any:
    return apply_speedups(nn.Linear(2, 2) if model is None else model, config)[1]


def in_a_thread(action: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(action()))
    thread.start()
    thread.join()
    return found[0]


# --- decided ---


def test_auto_offers_it_where_the_model_holds_such_numbers_and_says_how_many(hardware):
    decision = plan(SpeedConfig(), hardware("cpu"), Facts(denormals=0.25))["flush_denormals"]
    assert (decision.active, decision.worth_measuring) == (False, True)
    assert "25 % of the model's numbers are denormal" in decision.reason


def test_auto_leaves_models_without_them_alone_and_a_search_tries_nothing(hardware):
    from speedkit_jupyter.optimizations import named

    decision = plan(SpeedConfig(), hardware("cpu"), Facts())["flush_denormals"]
    assert (decision.active, decision.worth_measuring) == (False, None)
    assert named("flush_denormals").candidates(hardware("cpu"), Facts()) == ()


@pytest.mark.parametrize(
    ("machine", "facts", "why"),
    [
        ("t4", Facts(device="cuda:0"), "the model is on cuda:0: this is about CPUs"),
        ("apple_m2_mps", Facts(device="mps"), "about CPUs"),
    ],
)
def test_it_is_declined_where_it_means_nothing(hardware, machine, facts, why):
    decision = plan(SpeedConfig(flush_denormals=True), hardware(machine), facts)["flush_denormals"]
    assert decision.declined
    assert why in decision.reason


def test_a_processor_that_torch_can_not_set_is_named(hardware):
    machine = hardware("cpu")
    cpu = machine.cpu.model_copy(update={"architecture": "ppc64le"})
    other = machine.model_copy(update={"cpu": cpu})
    decision = plan(SpeedConfig(flush_denormals=True), other, Facts())["flush_denormals"]
    assert decision.declined
    assert "ppc64le" in decision.reason


def test_what_the_user_has_set_is_left_and_not_offered(hardware):
    facts = replace(Facts(denormals=0.5), flags={"flush_denormal": True})
    decision = plan(SpeedConfig(), hardware("cpu"), facts)["flush_denormals"]
    assert (decision.value, decision.active, decision.worth_measuring) == (True, False, None)


# --- what is seen of a model ---


def test_the_share_is_that_of_the_numbers_and_of_what_optimizers_keep():
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    assert Facts.read(model, [optimizer]).denormals == 0.0
    with torch.no_grad():
        optimizer.state[model.weight]["exp_avg_sq"].fill_(1e-40)
    assert Facts.read(model, [optimizer]).denormals == pytest.approx(1 / 3)
    assert Facts.read(model).denormals == 0.0


@pytest.mark.parametrize(
    "tensor",
    [
        lambda: torch.full((8,), 1e-40, device="meta"),
        lambda: torch.zeros(8),
        lambda: torch.full((8,), 1e-40).to_sparse(),
        lambda: torch.full((8, 8), 1e-40).t()[::2],
        lambda: torch.arange(8),
        lambda: torch.empty(0),
        lambda: nn.parameter.UninitializedParameter(),
    ],
)
def test_what_holds_none_or_can_not_be_read_counts_as_none(tensor):
    assert share([tensor()], []) == 0.0


def test_memory_that_was_given_back_is_not_read():
    tensor = torch.full((1 << 16,), 1e-40)
    tensor.untyped_storage().resize_(0)
    assert share([tensor], []) == 0.0


def test_no_mode_of_the_users_sees_it():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.device("meta"):
        assert share([torch.nn.Parameter.__new__(torch.nn.Parameter)], []) == 0.0
    real = torch.full((64,), 1e-40)
    with FakeTensorMode(), torch.inference_mode():
        assert share([real], []) == 1.0


# --- in force ---


def test_a_denormal_product_is_zero_in_this_thread_and_its_helpers_and_not_after():
    with applied() as context:
        assert context.changes() == (("flush_denormal", False, True),)
        assert shares_of_zeros() == [1.0, 1.0]
    assert shares_of_zeros() == [0.0, 0.0]


def test_torchs_own_switch_reaches_the_calling_thread_only_once_the_others_are_there():
    torch.set_flush_denormal(True)
    assert sorted(shares_of_zeros()) == [0.0, 1.0]
    torch.set_flush_denormal(False)


def test_backward_computes_under_it_too():
    x = torch.full((4,), 1e-30, requires_grad=True)
    with applied():
        (x * 1e-10).sum().mul(1e-30).backward()
        inside = x.grad.clone()
    x.grad = None
    (x * 1e-10).sum().mul(1e-30).backward()
    assert inside.count_nonzero() == 0
    assert x.grad.count_nonzero() == 4


def test_other_threads_keep_what_they_have_and_new_ones_have_it_for_good():
    go, stop, early = threading.Event(), threading.Event(), []

    def wait() -> None:
        go.wait()
        early.append(denormals.is_flushed())

    thread = threading.Thread(target=wait)
    thread.start()
    with applied():
        go.set()
        thread.join()
        late: list[bool] = []
        other = threading.Thread(target=lambda: (stop.wait(), late.append(denormals.is_flushed())))
        other.start()
    stop.set()
    other.join()
    assert early == [False]
    assert late == [True]  # what the plan's risk says: a thread begins with what its starter has
    assert in_a_thread(denormals.is_flushed) is False


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_plans_that_overlap_are_taken_back_in_any_order(order):
    contexts = [applied(model=nn.Linear(2, 2)) for _ in range(2)]
    contexts[order[0]].restore()
    assert shares_of_zeros() == [1.0, 1.0]
    contexts[order[1]].restore()
    assert shares_of_zeros() == [0.0, 0.0]


def test_nested_in_an_opposite_one_the_inner_holds_and_the_outer_returns():
    model, part = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    with applied(ON, model):
        with applied(OFF, part):
            assert shares_of_zeros() == [0.0, 0.0]
        assert shares_of_zeros() == [1.0, 1.0]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_it_goes_back_after_errors(error):
    with pytest.raises(error), applied():
        raise error
    assert shares_of_zeros() == [0.0, 0.0]


def test_what_the_user_had_is_put_back_thread_by_thread():
    torch.set_flush_denormal(True)  # in this thread only, since the helper is there
    with applied(OFF):
        assert shares_of_zeros() == [0.0, 0.0]
    assert denormals.is_flushed()
    assert sorted(shares_of_zeros()) == [0.0, 1.0]
    torch.set_flush_denormal(False)


def test_what_the_user_sets_meanwhile_stays_and_is_reported():
    context = applied()
    torch.set_flush_denormal(False)
    context.restore()
    assert context.kept == ("flush_denormal",)
    assert not denormals.is_flushed()


@pytest.mark.parametrize("meanwhile", [1, 3])
def test_helpers_that_come_or_go_meanwhile_have_nothing_left(meanwhile):
    with applied():
        torch.set_num_threads(meanwhile)
        assert shares_of_zeros(meanwhile) == [1.0] * meanwhile
    torch.set_num_threads(3)
    assert shares_of_zeros(3) == [0.0] * 3


def test_two_threads_have_each_its_own():
    first = applied(model=nn.Linear(2, 2))

    def second() -> list[Any]:
        torch.set_flush_denormal(False)  # it began with what this one has
        with applied(model=nn.Linear(2, 2)):
            inside = shares_of_zeros()
        return [inside, denormals.is_flushed()]

    assert in_a_thread(second) == [[1.0, 1.0], False]
    assert shares_of_zeros() == [1.0, 1.0]
    first.restore()
    assert first.kept == ()


def test_taken_back_in_another_thread_it_is_taken_back_in_the_main_one_all_the_same():
    context = applied()
    in_a_thread(context.restore)
    assert shares_of_zeros() == [0.0, 0.0]
    assert not denormals._CALLS
    with applied():
        assert shares_of_zeros() == [1.0, 1.0]


def test_a_model_that_goes_in_another_thread_leaves_nothing():
    models = [nn.Linear(2, 2)]
    applied(model=models[0])
    in_a_thread(models.clear)
    gc.collect()
    assert shares_of_zeros() == [0.0, 0.0]


def test_of_another_thread_than_the_main_one_it_says_that_it_stays():
    done, stop, contexts, left = threading.Event(), threading.Event(), [], []

    def other() -> None:
        contexts.append(applied())
        done.set()
        stop.wait()
        left.append(denormals.is_flushed())

    thread = threading.Thread(target=other)
    thread.start()
    done.wait()
    with pytest.warns(UserWarning, match="takes denormal numbers for zero until it ends"):
        contexts[0].restore()
    stop.set()
    thread.join()
    assert left == [True]
    assert shares_of_zeros() == [0.0, 0.0]


def test_where_the_helpers_can_not_be_reached_this_thread_is_set_all_the_same(monkeypatch):
    monkeypatch.setattr(denormals, "_parallel_region", lambda: None)
    with applied():
        assert denormals.is_flushed()
    assert not denormals.is_flushed()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_is_forked_off_waits_for_no_helper_and_has_its_own():
    with applied() as context:
        child = os.fork()
        if not child:
            signal.alarm(20)  # where it waits for ever
            context.restore()
            inherited = denormals.is_flushed()
            with applied(OFF):
                inside = denormals.is_flushed()
            os._exit(0 if (inherited, inside, denormals.is_flushed()) == (True, False, True) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert shares_of_zeros() == [1.0, 1.0]
    assert shares_of_zeros() == [0.0, 0.0]


def test_a_model_under_it_carries_nothing():
    model = nn.Linear(2, 2)
    with applied(model=model):
        assert sorted(model.__dict__) == sorted(nn.Linear(2, 2).__dict__)
        assert list(model.state_dict()) == ["weight", "bias"]
    assert restore_all() == 0


def test_a_snapshot_of_all_flags_puts_it_back():
    before = flags.snapshot()
    torch.set_flush_denormal(True)
    flags.restore(before)
    assert not denormals.is_flushed()


def noted(file: Path) -> None:
    """Into a file: what a measured step kept itself would be put back."""
    with file.open("a") as opened:
        opened.write(f"{denormals.is_flushed()} ")


def test_a_measured_step_that_sets_it_itself_is_put_back(tmp_path):
    model, file = nn.Linear(4, 4), tmp_path / "states"

    def step() -> torch.Tensor:
        torch.set_flush_denormal(True)
        noted(file)
        return model(torch.ones(2, 4)).square().sum()

    benchmark(step, "baseline,threads:1", budget_s=0.1)
    assert set(file.read_text().split()) == {"True"}
    assert not denormals.is_flushed()


def test_measured_it_is_in_force_in_its_own_steps_only(tmp_path):
    model, file = nn.Linear(4, 4), tmp_path / "states"

    def step() -> torch.Tensor:
        noted(file)
        return model(torch.ones(2, 4)).square().sum()

    benchmark(step, "baseline,flush_denormals", budget_s=0.1)
    assert set(file.read_text().split()) == {"True", "False"}
    assert shares_of_zeros() == [0.0, 0.0]


@pytest.mark.parametrize("form", ["torch", "accelerate", "fabric", "transformers"])
def test_the_code_is_torchs_line_and_comes_first(form):
    text = code(plan(ON), form)
    assert "torch.set_flush_denormal(True)" in text
