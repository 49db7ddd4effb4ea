"""Candidates race until it is clear; what is clearly slower leaves."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

import pytest

from speedkit_jupyter.loading.candidate import Candidate
from speedkit_jupyter.loading.race import LEAST, MOST, Race
from speedkit_jupyter.loading.remarks import unproven
from speedkit_jupyter.loading.settings import Settings


def raced(times: Mapping[Candidate, float], begins: float = 0.0) -> Race:
    """With times that waver by a few percent, until it is settled."""
    wavering = cycle((0.98, 1.0, 1.02, 0.99, 1.01))

    def block(one: Candidate, number: int, epoch: int) -> None:
        if times[one] < 0:
            raise RuntimeError("DataLoader worker exited\nwith: a bus error")
        one.times_s[number] = times[one] * next(wavering)
        one.begins_s = [begins * one.settings.num_workers]

    race = Race(list(times), block, epoch=10)
    while len(race.racing) > 1 and not race.is_settled():
        list(race.round())
    return race


def workers(number: int, threads: int | None = None) -> Candidate:
    return Candidate(Settings(number), threads)


def test_the_quickest_is_the_best() -> None:
    own, one, two = workers(0), workers(1), workers(2)
    race = raced({own: 1.0, one: 0.8, two: 0.75})
    ratio = race.ratio(two)
    assert race.best() is two
    assert ratio is not None
    assert ratio.low > 1


def test_of_equals_the_one_that_comes_first_is() -> None:
    own, one = workers(0), workers(1)
    assert raced({own: 1.0, one: 1.0}).best() is own


def test_what_is_clearly_slower_leaves_after_few_rounds() -> None:
    own, slow, two = workers(0), workers(1), workers(2)
    race = raced({own: 1.0, slow: 3.0, two: 0.9})
    assert "times the quickest's time" in slow.why_out
    assert len(slow.times_s) < LEAST <= len(two.times_s) <= race.rounds <= MOST


def test_the_users_own_never_leaves() -> None:
    own, one = workers(0), workers(1)
    assert raced({own: 9.0, one: 1.0}).racing == [own, one]


def test_what_fails_leaves_with_its_last_line() -> None:
    own, broken = workers(0), workers(1)
    race = raced({own: 1.0, broken: -1.0})
    assert broken.failure == "RuntimeError: with: a bus error"
    assert race.best() is own


def test_the_users_own_error_is_the_users() -> None:
    with pytest.raises(RuntimeError, match="bus error"):
        raced({workers(0): -1.0, workers(1): 1.0})


def test_beginning_an_epoch_counts() -> None:
    own, one = workers(0), workers(1)
    race = raced({own: 1.0, one: 0.9}, begins=5.0)
    assert race.best() is own


def test_threads_beside_are_no_setting_of_the_loader() -> None:
    own, one, beside = workers(0), workers(2), workers(2, threads=1)
    race = raced({own: 1.0, one: 0.9, beside: 0.5})
    assert race.best() is one
    assert beside.words == "2 workers, started for each epoch, 1 thread beside"


def test_what_is_near_the_quickest_goes_on_beside_it() -> None:
    own, near, quickest, far, beside = (workers(0), workers(1), workers(2), workers(3),
                                        workers(2, threads=1))  # fmt: skip
    times = {own: 1.0, near: 0.82, quickest: 0.8, far: 0.88, beside: 0.7}
    race = Race(list(times), lambda *_: None, epoch=10)
    for one, seconds in times.items():
        one.times_s = {0: seconds}
    assert race.finalists() == [quickest, near]
    race.narrow()
    assert race.racing == [own, near, quickest, beside]
    assert far.why_out == "not the quickest in the middle"


def test_workers_that_are_stuck_later_are_waited_for_once() -> None:
    own, one, two = workers(0), workers(1), workers(2)

    def block(candidate: Candidate, number: int, epoch: int) -> None:
        if candidate.settings.num_workers:
            raise RuntimeError("DataLoader timed out after 3.0 seconds")
        candidate.times_s[number] = 1.0

    race = Race([own, one, two], block, epoch=10)
    list(race.round())
    words = sorted([one.why_out, two.why_out], key=len)
    assert words[0] == "gave no batch within 3 s"
    assert words[1].startswith("not tried further: ")
    assert race.racing == [own]


def test_what_looked_faster_and_is_not_proven_says_how_to_know() -> None:
    own, one = workers(0), workers(1)
    race = Race([own, one], lambda *_: None, epoch=10)
    own.times_s, one.times_s = {0: 1.0, 1: 1.0}, {0: 0.8, 1: 0.8}
    (said,) = unproven(race, own, 10.0)
    assert said.startswith("not proven: 1 worker, ")
    assert said.endswith(", which looked 1.25 times as fast; a longer --budget may settle it")
    assert not list(unproven(race, one, 10.0))
    one.times_s = {0: 0.99, 1: 0.99}
    assert not list(unproven(race, own, 10.0))
