"""Less memory, for no more than a factor of time that the user names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter import StepError, tune
from speedkit_jupyter.measure.checks.accuracy import Accuracy
from speedkit_jupyter.measure.checks.memory import Memory
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.tuning.aim import Aim


def record(name: str, times: float, peak: int, rounds: int = 40, spread: int = 1) -> Record:
    """Of steps that take so many times 10 ms, give or take `spread` percent."""
    times_s = [0.01 * times * (1 + spread * (at % 5 - 2) / 100) for at in range(rounds)]
    return Record(name, times_s, 0.5, accuracy=Accuracy("exact"), memory=Memory(peak, 1))


def scored(one: Record, within: float | None) -> tuple[float, float, str]:
    found = Comparison((record("baseline", 1, 1000), one), {}, 10)
    aim = Aim(memory=True, within=within)
    return aim.gain(found, one, proven=True), aim.gain(found, one), aim.why_not(found, one, "x")


def test_what_stays_within_the_factor_is_taken() -> None:
    proven, looks, _ = scored(record("checkpoint", 1.15, 500), 1.2)
    assert proven == looks == pytest.approx(2.0)


def test_what_is_slower_than_that_is_not_and_says_so() -> None:
    proven, looks, why = scored(record("checkpoint", 1.4, 500), 1.2)
    assert proven == looks == 0
    assert why == "its peak is 50% of baseline's, but it takes 1.40 times the time, more than 1.2"


def test_without_a_factor_memory_may_cost_time() -> None:
    assert scored(record("checkpoint", 1.4, 500), None)[0] == pytest.approx(2.0)


def test_what_is_not_proven_to_stay_within_it_is_chosen_but_not_taken() -> None:
    proven, looks, why = scored(record("checkpoint", 1.15, 500, rounds=5), 1.2)
    assert proven == 0
    assert looks == 0 or looks == pytest.approx(2.0)
    assert "1.15 times the time, not proven to be 1.2 at most" in why


ERRORS = {
    "with time": ({"within": 1.2}, "belongs to the objective memory"),
    "below 1": ({"objective": "memory", "within": 0.5}, "within must be 1 or more"),
    "a word": ({"objective": "memory", "within": "fast"}, "within must be a number"),
}


@pytest.mark.parametrize("kind", list(ERRORS))
def test_a_factor_that_cant_be_meant_is_refused(kind: str) -> None:
    net = nn.Linear(2, 2)
    options, words = ERRORS[kind]
    with pytest.raises(StepError, match=words):
        tune(lambda: net(torch.ones(1, 2)), **options)
