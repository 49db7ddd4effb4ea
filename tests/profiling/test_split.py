"""The stopwatch: one part at any moment, and all of them sum to the whole."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedkit_jupyter.profiling.overhead import LEAST_LEFT, MOST_TIMES
from speedkit_jupyter.profiling.profile import Profile
from speedkit_jupyter.profiling.split import PARTS, Overhead, Split


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@given(
    st.lists(
        st.tuples(st.sampled_from(["enter", "leave", "pass"]), st.sampled_from(PARTS)), max_size=40
    )
)
def test_whatever_begins_and_ends_the_parts_sum_to_the_whole(events):
    clock = Clock()
    split = Split(clock)
    with split.run():
        for event, part in events:
            if event == "enter":
                split.enter(part)
            elif event == "leave" and split.depth > 1:
                split.leave()
            clock.now_s += 1.0
    assert split.total_s == pytest.approx(clock.now_s)
    assert split.depth == 0


@pytest.mark.parametrize(
    ("outer", "inner", "counts"),
    [
        ("data", "forward", "data"),
        ("data", "synchronizations", "data"),
        ("backward", "forward", "backward"),
        ("backward", "synchronizations", "synchronizations"),
        ("optimizer", "forward", "forward"),
        ("optimizer", "backward", "backward"),
        ("forward", "backward", "backward"),
        ("forward", "synchronizations", "synchronizations"),
        ("forward", "compiling", "compiling"),
        ("compiling", "forward", "compiling"),
    ],
)
def test_what_happens_within_a_part_is_its_own_or_the_part_s(clock, outer, inner, counts):
    split = Split(clock)
    with split.run(), split.within(outer):
        clock.now_s += 1
        with split.within(inner):
            clock.now_s += 10
        clock.now_s += 1
    assert split.seconds[counts] == (12 if counts == outer else 10)
    assert split.seconds[outer] == (12 if counts == outer else 2)


def test_an_optimizer_that_raised_ends_with_what_is_around_it(clock):
    split = Split(clock)
    with split.run():
        depth = split.depth
        split.enter("optimizer")
        split.enter("forward")
        split.leave(depth)
        assert split.part == "rest"


def test_time_that_turns_out_to_be_another_part_s_is_moved(clock):
    split = Split(clock)
    with split.run():
        clock.now_s += 1
        mark = split.mark()
        clock.now_s += 5
        split.moved(mark, "forward")
    assert split.seconds["forward"] == 5
    assert split.seconds["rest"] == 1


def test_what_telling_takes_is_taken_off_the_parts_that_it_fell_into():
    ticks = itertools.count()
    split = Split(
        now=lambda: float(next(ticks)), overhead=Overhead(around=0.25, inside=0.5, between=0.125)
    )
    with split.run():
        with split.within("forward"):
            pass
        split.mark(between=True)
    # One tick between any two looks at the clock.
    assert split.seconds["forward"] == 0.5
    assert split.seconds["rest"] == 3.0 - 0.25 - 0.125
    assert split.seconds["ours"] == 0.875
    assert split.total_s + split.seconds["ours"] == 4.0


def test_a_method_that_only_passes_by_is_taken_off_where_it_was():
    clock = Clock()
    split = Split(clock, Overhead(passing=0.5))
    with split.run(), split.within("optimizer"):
        clock.now_s += 4.0
        split.passed["optimizer"] += 2
    assert (split.seconds["optimizer"], split.seconds["ours"]) == (3.0, 1.0)


def told(forward_s: float, optimizer_s: float, off: dict) -> Split:
    """One call's split, after what telling took was taken off."""
    split = Split()
    split.pieces |= {("forward", "forward"): forward_s, ("optimizer", "optimizer"): optimizer_s}
    split.taken_off |= {(part, part): seconds for part, seconds in off.items()}
    return split


@pytest.mark.parametrize(
    ("plain_s", "forward_share"),
    [
        (10.0, 5 / 10),  # telling took twice as much as it does alone: all of it the optimizer's
        (11.0, 5 / 11),
        (11.5, 5 / 11.5),  # it took half of that
        (20.0, 5 / 12),  # nothing; that plain calls were slower yet says no more
        (
            2.0,
            5 / (5 + max(6 - MOST_TIMES, 6 * LEAST_LEFT)),
        ),  # so much is no telling: others kept the processor busy
    ],
)
def test_telling_takes_as_much_as_the_plain_calls_are_shorter(plain_s, forward_share):
    found = Profile(splits=[told(5.0, 6.0, {"optimizer": 1.0})] * 3, plain_s=[plain_s] * 3)
    assert found.share("forward") == pytest.approx(forward_share)
    assert sum(found.share(part) for part in PARTS) == pytest.approx(1.0)


def test_where_telling_takes_long_calls_that_are_told_of_little_say_how_long_each_part_is():
    clock = Clock()
    split = Split(clock, Overhead(before=1.0))
    with split.run():
        with split.within("forward"):
            clock.now_s += 8.0  # after what telling took it is cold
            with split.within("synchronizations"):
                clock.now_s += 2.0
        clock.now_s += 10.0
    whole = Split(clock)
    with whole.run():
        with whole.within("forward"):
            clock.now_s += 5.0
        clock.now_s += 3.0
    found = Profile(splits=[split] * 2, whole=[whole] * 3, plain_s=[8.0] * 2)
    assert found.share("forward") == pytest.approx(4 / 8)
    assert found.share("synchronizations") == pytest.approx(1 / 8)
    assert found.share("rest") == pytest.approx(3 / 8)


def test_of_each_part_something_is_left_once_telling_is_taken_off():
    splits = [told(5.0, 1.0, {"optimizer": 1.0})] * 3
    found = Profile(splits=splits, plain_s=[1.0] * 3)
    assert found.share("optimizer") == pytest.approx(LEAST_LEFT / (5 + LEAST_LEFT))
