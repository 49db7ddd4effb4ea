"""Detect steps that do less work on later calls, and accept steps that only seem to."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.rounds.timing import Timer, Timing
from speedkit_jupyter.step.step import step_of

MANY = 12


class Slow(nn.Linear):
    def __init__(self, clock: Any) -> None:
        super().__init__(4, 4)
        self.sleep = clock.sleep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sleep(0.01)
        return super().forward(x)


@dataclass
class Work:
    model: nn.Module
    x: torch.Tensor = field(default_factory=lambda: torch.ones(2, 4))
    done: int = 0
    memo: dict[str, Any] = field(default_factory=dict)
    trained: bool = False

    def train(self) -> None:
        self.model(self.x).sum().backward()

    def predict(self) -> torch.Tensor:
        with torch.no_grad():
            return self.model(self.x)


def fit_that_is_done(work: Work) -> None:
    while work.done < MANY:
        work.train()
        work.done += 1


def memo(work: Work) -> None:
    if "y" not in work.memo:
        work.memo["y"] = [work.predict() for _ in range(MANY)]


LESS = (fit_that_is_done, memo)


def slow_first_call(work: Work) -> None:
    if not work.trained:
        work.model.sleep(1.0)
        work.trained = True
    work.train()


def more_and_more(work: Work) -> None:
    work.done += 1
    for _ in range(work.done):
        work.train()


HONEST = (slow_first_call, more_and_more)


@pytest.fixture
def work(made_time) -> Work:
    return Work(Slow(made_time))


@pytest.mark.parametrize("step", LESS)
def test_each_measured_call_does_what_the_users_first_one_does(work, step):
    found = benchmark(lambda: step(work), "baseline,bf16", model=work.model, budget_s=8)
    assert f"instead of {MANY}" in found.repeats
    assert "each measured call starts from your state" in repr(found).replace("\n", " ")
    assert len(found.baseline.times_s) > 5
    for record in found.records:
        assert all(time_s > 0.01 * (MANY - 1) for time_s in record.times_s), record.name
    assert (work.done, work.memo, work.trained) == (0, {}, False)
    assert found.to_dict()["repeats"] == found.repeats


@pytest.mark.sampled(4)
@pytest.mark.parametrize("step", HONEST)
def test_what_varies_or_is_slow_at_first_is_measured_warm(work, step):
    found = benchmark(lambda: step(work), "baseline,bf16", model=work.model, budget_s=5)
    assert found.repeats == ""


def test_what_does_a_little_less_is_measured_as_it_goes_on_and_that_is_said(work):
    def step() -> None:
        work.done += 1
        for _ in range(MANY if work.done == 1 else MANY // 2):
            work.train()

    found = benchmark(step, "baseline", model=work.model, budget_s=5)
    assert "(6 instead of 12 backward passes): later calls are timed" in found.repeats
    assert found.baseline.times_s
    assert all(time_s < 0.01 * MANY for time_s in found.baseline.times_s)


def test_a_cell_is_timed_from_its_beginning_too(work):
    def loop(number: int, watch: Any) -> None:
        watch.begin()
        for _ in range(number):
            fit_that_is_done(work)
        watch.end()

    step = step_of(lambda: fit_that_is_done(work), work.model)
    timer = Timer(step, loop, torch.device("cpu"), Timing(), timer=work.model.sleep.__self__.now_s)
    list(timer.run())
    assert "each measured call starts" in timer.timing.repeats
    assert timer.timing.loops == 1
    assert timer.timing.best > 0.01 * (MANY - 1)
    assert work.done == 0
