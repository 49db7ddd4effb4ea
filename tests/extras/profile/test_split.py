"""The stopwatch: one part at any moment, and all of them sum to the whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedkit_jupyter.extras.profile.instruments import Recorder
from speedkit_jupyter.extras.profile.profile import PARTS, Profile, Split


def clock_and_recorder() -> tuple[SimpleNamespace, Recorder]:
    """Return a clock whose seconds pass as the test says, and a recorder that goes by it."""
    clock = SimpleNamespace(now_s=0.0)
    return clock, Recorder(lambda: clock.now_s)


@given(
    st.lists(
        st.tuples(st.sampled_from(["enter", "leave", "pass"]), st.sampled_from(PARTS)), max_size=40
    )
)
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
    """Return a split of pieces, as `optimizer` or `rest__forward`: forward within the rest."""
    split = Split()
    for name, spent_s in seconds.items():
        around, _, part = name.partition("__")
        split.pieces[around, part or around] = spent_s
    return split


def test_where_instruments_take_long_calls_without_them_give_the_length_of_each_whole_part():
    found = Profile(splits=[made(forward=5.0, rest=5.0, rest__overhead=90.0)] * 3, plain_s=[100.0])
    assert found.share("forward") == pytest.approx(0.5)  # no such calls
    assert sum(map(found.share, PARTS)) == pytest.approx(1.0)
    told = made(forward=8.0, forward__synchronizations=2.0, rest=10.0)
    whole = made(forward=5.0, rest=3.0)
    found = Profile(splits=[told] * 2, whole=[whole] * 3, plain_s=[8.0] * 2)
    shares = [found.share(part) for part in ("forward", "synchronizations", "rest")]
    assert shares == pytest.approx([4 / 8, 1 / 8, 3 / 8])
    # Where they take no longer, the calls with instruments count.
    found = Profile(splits=[told] * 2, whole=[whole] * 3, plain_s=[20.0] * 2)
    assert found.share("forward") == pytest.approx(8 / 20)
