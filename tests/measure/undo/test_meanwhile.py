"""Another thread works on what the step reaches beside its own: it is left to it, and named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from second_thread import network
from second_worker import SHARED, trained, working

from speedkit_jupyter import benchmark, tune, verify
from speedkit_jupyter.measure.subject.step import StateWarning
from speedkit_jupyter.measure.undo import meanwhile
from speedkit_jupyter.measure.undo.isolation import State
from speedkit_jupyter.measure.undo.kinds.tensors.tensors import Gradients
from speedkit_jupyter.measure.undo.walk import Walk

pytestmark = pytest.mark.filterwarnings(
    "ignore::speedkit_jupyter.measure.subject.step.StateWarning"
)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", SHARED)
def test_what_another_thread_works_on_is_left_to_it_and_named(kind):
    shared = SHARED[kind]()
    with working(shared):
        found = benchmark(shared.step, "baseline,bf16,fp16,fused_optimizer", budget_s=0.2)
    assert [one.failure for one in found.records] == [None] * 4
    (line,) = (line for line in found.beyond if "another thread" in line)
    assert shared.names in line
    assert "left to it" in line


@pytest.mark.slow
def test_verifying_and_tuning_leave_it_alone_too():
    shared = SHARED["a dict"]()
    with working(shared):
        verify(shared.step, "bf16", steps=3)
        tune(shared.step, budget_s=0.5, fresh=True)


@pytest.mark.slow
def test_where_a_thread_trains_nothing_that_is_reached_nothing_is_named():
    shared, other = SHARED["a dict"](), SHARED["a dict"]()
    with working(other):
        found = benchmark(shared.step, "baseline,bf16", budget_s=0.1)
    assert not [line for line in found.beyond if "another thread" in line]


def test_a_thread_that_only_waits_keeps_nothing_from_being_put_back():
    model, log = network(), [0]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step() -> None:
        trained(model, optimizer)
        log.append(len(log))

    before = [p.detach().clone() for p in model.parameters()]
    with _waiting():
        found = benchmark(step, "baseline,bf16", budget_s=0.1)
    assert log == [0]
    assert not optimizer.state
    assert all(map(torch.equal, before, model.parameters()))
    assert not [line for line in found.beyond if "another thread" in line]


def test_without_another_thread_at_work_no_time_is_spent_on_looking(monkeypatch):
    monkeypatch.setattr(meanwhile, "sleep", _never)
    numbers = [1, 2]
    state = State(others=[numbers])
    numbers.append(3)
    state.restore()
    assert numbers == [1, 2]


def test_the_line_is_a_warning_as_well():
    shared = SHARED["a growing list"]()
    with working(shared), pytest.warns(StateWarning, match="changed by another thread"):
        benchmark(shared.step, "baseline", budget_s=0.1)


@contextmanager
def _waiting() -> Iterator[None]:
    end = threading.Event()

    def wait() -> None:
        end.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _never(seconds: float) -> Callable[[], None]:
    raise AssertionError(f"it slept {seconds} s")


def test_gradients_that_another_thread_writes_are_read_by_nobody():
    """To read one while a backward pass writes it ends the process, sooner or later."""
    ours, theirs = network(), network()
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    trained(ours, torch.optim.SGD(ours.parameters(), 0.0))
    done, started = threading.Event(), threading.Event()

    def train() -> None:
        while not done.is_set():
            trained(theirs, optimizer)
            started.set()

    thread = threading.Thread(target=train)
    thread.start()
    started.wait(10)
    try:
        walk = Walk([{"ours": ours, "theirs": theirs, "their optimizer": optimizer}])
    finally:
        done.set()
        thread.join()
    looked_at = {
        name: any(isinstance(kind, Gradients) for kind in walk.kinds(parameter))
        for net, word in ((ours, "ours"), (theirs, "theirs"))
        for name, parameter in net.named_parameters(prefix=word)
    }
    assert looked_at == {name: name.startswith("ours") for name in looked_at}
    assert not any(map(walk.is_trained_elsewhere, ours.parameters()))
    assert all(map(walk.is_trained_elsewhere, theirs.parameters()))
