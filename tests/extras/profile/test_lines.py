"""Check the time per line of the user's code, and the division of a step into parts."""

import inspect
import signal
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from speedkit_jupyter import profile
from speedkit_jupyter.extras.profile import instruments
from speedkit_jupyter.extras.profile.instruments import Recorder, sampled
from speedkit_jupyter.extras.profile.profile import PARTS, Profile, Split

pytestmark = pytest.mark.real_time


def shares(found: Profile, function: Any) -> dict[str, float]:
    lines, first = inspect.getsourcelines(function)
    own = {spot.number: share for spot, share in found.lines.costliest()}
    return {text.strip(): own.get(first + at, 0.0) for at, text in enumerate(lines)}


def slow_metric() -> int:
    end_s, rounds = time.perf_counter() + 0.01, 0
    while time.perf_counter() < end_s:
        rounds += 1
    return rounds


def slow_step() -> None:
    nn.Linear(4, 4)(torch.ones(64, 4))
    slow_metric()
    time.sleep(0.01)


@pytest.mark.slow
def test_lines_have_the_shares_of_the_time_that_goes_by_in_them():
    found = profile(slow_step, budget_s=2)
    by_text, inner = shares(found, slow_step), sum(shares(found, slow_metric).values())
    assert by_text["time.sleep(0.01)"] > 0.15
    assert inner > 0.1
    assert by_text["slow_metric()"] < inner / 2
    assert sum(share for _, share in found.lines.costliest()) == pytest.approx(1.0, abs=0.15)


def test_a_call_that_takes_all_of_the_budget_is_the_profile_and_has_its_lines():
    def step() -> None:
        nn.Linear(4, 4)(torch.ones(2, 4))
        time.sleep(0.3)

    found = profile(step, budget_s=0.2)
    assert found.why_no_costs
    assert len(found.taken) == 1
    assert found.share("rest") > 0.5
    assert "too long for a second" in repr(found)
    assert shares(found, step)["time.sleep(0.3)"] > 0.5


def test_no_lines_are_sampled_outside_of_the_main_thread():
    recorder = Recorder()

    def look() -> None:
        with sampled(recorder):
            time.sleep(0.02)

    other = threading.Thread(target=look)
    other.start()
    other.join()
    assert recorder.split.samples == []


def test_sampling_starts_no_thread_and_leaves_timers_and_handlers_as_they_were(monkeypatch):
    """A thread that reads another thread's frames can crash Python."""

    def begun(*_: Any) -> None:
        raise AssertionError("a thread was started")

    def own(*_: Any) -> None:
        pass

    monkeypatch.setattr(threading.Thread, "start", begun)
    monkeypatch.setattr(sys, "_current_frames", begun)
    for handler in (signal.SIG_DFL, own):
        before = signal.signal(signal.SIGALRM, handler)
        try:
            with suppress(ZeroDivisionError), sampled(Recorder()):
                time.sleep(0.01)
                raise ZeroDivisionError
            assert signal.getsignal(signal.SIGALRM) is handler
            assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        finally:
            signal.signal(signal.SIGALRM, before)


def test_a_sample_that_takes_longer_than_the_interval_is_not_interrupted_by_the_next(monkeypatch):
    """On a busy machine, samples that interrupt samples would end in a RecursionError."""
    begun: list[int] = []

    def slowly(depth: int) -> None:
        begun.append(1)
        until_s = time.perf_counter() + 3 * instruments.SAMPLE_EVERY_S
        while time.perf_counter() < until_s:
            pass
        assert begun.pop()
        assert begun == []

    monkeypatch.setattr(instruments, "user_spot", slowly)
    recorder = Recorder()
    with sampled(recorder), recorder.run():
        while len(recorder.split.samples) < 3:
            pass


def test_a_time_out_that_the_step_sets_is_its_own():
    rung, recorder = [], Recorder()
    before = signal.getsignal(signal.SIGALRM)
    try:
        with sampled(recorder), recorder.run():
            signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            time.sleep(0.05)
        assert rung == [1]
        assert signal.getsignal(signal.SIGALRM) is not before
    finally:
        signal.signal(signal.SIGALRM, before)


def clock_and_recorder() -> tuple[SimpleNamespace, Recorder]:
    """Return a clock that the test sets, and a recorder that reads the clock."""
    clock = SimpleNamespace(now_s=0.0)
    return clock, Recorder(lambda: clock.now_s)


ACTS = st.sampled_from(["enter", "leave", "pass"])


@given(st.lists(st.tuples(ACTS, st.sampled_from(PARTS)), max_size=40))
def test_whatever_begins_and_ends_the_parts_sum_to_the_whole(events):
    (clock, recorder), begun = clock_and_recorder(), []
    with recorder.run() as split:
        for event, part in events:
            if event == "enter":
                begun.append(recorder.begin(part))
            elif event == "leave" and begun:
                recorder.end(begun.pop())
            clock.now_s += 1.0
    assert split.total_s == pytest.approx(clock.now_s)
    assert recorder.part == "overhead"


@pytest.mark.parametrize(
    ("outer", "inner", "counts"),
    [
        *((outer, inner, outer) for outer, inner in (
            ("data", "forward"), ("data", "synchronizations"), ("backward", "forward"),
            ("compiling", "forward"))),
        *((outer, inner, inner) for outer, inner in (
            ("backward", "synchronizations"), ("optimizer", "forward"), ("optimizer", "backward"),
            ("forward", "backward"), ("forward", "synchronizations"), ("forward", "compiling"))),
    ],
)  # fmt: skip
def test_what_happens_within_a_part_is_its_own_or_the_part_s(outer, inner, counts):
    clock, recorder = clock_and_recorder()
    with recorder.run() as split, recorder.within(outer):
        clock.now_s += 1
        with recorder.within(inner):
            clock.now_s += 10
        clock.now_s += 1
    assert split.seconds[counts] == (12 if counts == outer else 10)
    assert split.seconds[outer] == (12 if counts == outer else 2)


def made(**seconds: float) -> Split:
    """Return a split with these seconds; `rest__forward` is the forward pass within the rest."""
    split = Split()
    for name, spent_s in seconds.items():
        around, _, part = name.partition("__")
        split.pieces[around, part or around] = spent_s
    return split


def test_where_instruments_take_long_calls_without_them_give_the_length_of_each_whole_part():
    found = Profile(splits=[made(forward=5.0, rest=5.0, rest__overhead=90.0)] * 3, plain_s=[100.0])
    assert found.share("forward") == pytest.approx(0.5)  # `whole` is empty
    assert sum(map(found.share, PARTS)) == pytest.approx(1.0)
    told = made(forward=8.0, forward__synchronizations=2.0, rest=10.0)
    whole = made(forward=5.0, rest=3.0)
    found = Profile(splits=[told] * 2, whole=[whole] * 3, plain_s=[8.0] * 2)
    shares = [found.share(part) for part in ("forward", "synchronizations", "rest")]
    assert shares == pytest.approx([4 / 8, 1 / 8, 3 / 8])
    # If instruments take no time, the calls with all instruments count.
    found = Profile(splits=[told] * 2, whole=[whole] * 3, plain_s=[20.0] * 2)
    assert found.share("forward") == pytest.approx(8 / 20)
