"""Loaders race until it is clear; clearly slower ones leave."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import pytest

from speedkit_jupyter.extras.data.loader_race import LEAST, MOST, LoaderRace, LoaderWay
from speedkit_jupyter.extras.data.loader_settings import LoaderSettings


def raced(times: Mapping[LoaderWay, float], waits: Mapping[LoaderWay, float] = {}) -> LoaderRace:
    """With times that waver by a few percent, until it is settled."""
    wavering = cycle((0.98, 1.0, 1.02, 0.99, 1.01))

    def block(one: LoaderWay, number: int) -> tuple[float, float]:
        if times[one] < 0:
            raise RuntimeError("DataLoader worker exited\nwith: a bus error")
        waver, wait_s = next(wavering), waits.get(one, times[one])
        return (times[one] - wait_s) * waver, wait_s * waver

    race = LoaderRace(list(times), block)
    while len(race.racing) > 1 and not race.is_settled():
        list(race.round(race.racing))
    return race


def workers(number: int, **more: Any) -> LoaderWay:
    return LoaderWay(LoaderSettings(number, **more))


@pytest.mark.parametrize(("time", "is_taken"), [(0.75, True), (0.99, False), (1.2, False)])
def test_another_one_is_taken_where_it_is_proven_faster_by_enough(time, is_taken) -> None:
    own, one, two = workers(0), workers(1), workers(2)
    race = raced({own: 1.0, one: 1.1, two: time}, waits={own: 0.5, two: time - 0.5})
    assert race.proven() is (two if is_taken else own)


def test_what_is_clearly_slower_leaves_after_few_rounds() -> None:
    own, slow, two = workers(0), workers(1), workers(2)
    race = raced({own: 1.0, slow: 3.0, two: 0.9})
    assert slow.why_out == "slower than the best, dropped"
    assert len(slow.times_s) < LEAST <= len(two.times_s) <= race.rounds <= MOST


def test_what_fails_leaves_with_its_last_line_and_the_users_own_error_is_the_users() -> None:
    own, broken = workers(0), workers(1)
    race = raced({own: 1.0, broken: -1.0})
    assert broken.why_out == "RuntimeError: with: a bus error"
    assert race.fastest is own
    with pytest.raises(RuntimeError, match="bus error"):
        raced({workers(0): -1.0, workers(1): 1.0})


@pytest.mark.parametrize(("before", "now", "least", "most"), [(0, 2, 1.05, 1.2), (2, 0, 1.5, 3)])
def test_a_gain_is_no_more_than_the_waiting_that_is_removed(before, now, least, most) -> None:
    """Unless fewer workers leave the step the cores."""
    own, one = workers(before), workers(now)
    ratio = raced({own: 1.0, one: 0.5}, waits={own: 0.1, one: 0.0}).ratio(one)
    assert ratio is not None
    assert least < ratio.low <= ratio.high < most


def test_workers_that_are_stuck_later_are_waited_for_once() -> None:
    own, one, two = workers(0), workers(1), workers(2)

    def block(way: LoaderWay, number: int) -> tuple[float, float]:
        if way.settings.num_workers:
            raise RuntimeError("DataLoader timed out after 3.0 seconds")
        return 1.0, 0.0

    race = LoaderRace([own, one, two], block)
    list(race.round(race.racing))
    words = sorted([one.why_out, two.why_out])
    assert words == [
        "RuntimeError: DataLoader timed out after 3.0 seconds",
        "not tried: other workers gave no batch",
    ]
    assert race.racing == [own]
