"""What makes another model never wins by speed: a number that the user names decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import (
    Facts,
    Hardware,
    StepError,
    benchmark,
    machines,
    optimization,
    plan,
)
from speedkit_jupyter.catalog import CATALOG, named
from speedkit_jupyter.catalog.base.decision import Effect
from speedkit_jupyter.plans import own_kernels
from speedkit_jupyter.report.comparison_report import comparison_report
from speedkit_jupyter.right.judge import Accuracy
from speedkit_jupyter.right.named_accuracy import Scored
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.search.candidates import candidates
from speedkit_jupyter.search.objective import gain_of, why_not

pytestmark = pytest.mark.usefixtures("made_time")

OTHER = {"tanh_gelu": True}


def tanh_gelu(module: nn.GELU, x: torch.Tensor) -> torch.Tensor:
    """Approximate GELU by tanh."""
    return nn.functional.gelu(x, approximate="tanh")


@pytest.fixture
def other_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add an entry that changes the model's arithmetic."""
    optimization("tanh_gelu", replaces=nn.GELU)(tanh_gelu)
    monkeypatch.setattr(type(named("tanh_gelu")), "effect", Effect.CHANGES_MODEL)
    yield
    own_kernels.forget("tanh_gelu")


def words(text: object) -> str:
    return " ".join(repr(text).split())


class Parts:
    """A classifier of points, its training and inference steps, and data that it never sees."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(4, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 2)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.x, self.test = torch.rand(64, 4), torch.rand(200, 4)
        self.y, self.truth = self.labels(self.x), self.labels(self.test)
        self.seen = SimpleQueue[Any]()

    @staticmethod
    def labels(points: torch.Tensor) -> torch.Tensor:
        return (points.sum(1) > 2).long()

    def train(self) -> None:
        self.model.train()
        nn.functional.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def infer(self) -> torch.Tensor:
        with torch.no_grad():
            return self.model(self.x)

    @property
    def is_other(self) -> bool:
        return "forward" in vars(self.model[2])

    def right(self) -> float:
        self.model.eval()
        self.seen.put((self.is_other, torch.is_grad_enabled()))
        found = self.model(self.test).argmax(1)
        return float((found == self.truth).float().mean())


@pytest.fixture
def parts(other_model: None) -> Parts:
    return Parts()


def state(parts: Parts) -> list[Any]:
    model, optimizer = parts.model, parts.optimizer
    values = [value.tolist() for value in model.state_dict().values()]
    modes = [part.training for part in model.modules()]
    return [values, modes, torch.get_rng_state().tolist(), str(optimizer.state_dict())]


def test_a_benchmark_asks_it_under_each_variant_and_puts_everything_back(parts):
    before = state(parts)
    found = benchmark(parts.infer, "baseline,tanh_gelu", budget_s=0.2, accuracy=parts.right)
    assert state(parts) == before
    seen = [parts.seen.get_nowait() for _ in range(parts.seen.qsize())]
    assert seen == [(False, False), (True, False)]
    baseline, gelu = found.records
    assert baseline.score.before == baseline.score.after == gelu.score.before
    assert gelu.score.function == "right"
    assert gelu.is_accepted
    assert "right()" in words(found)
    assert found.to_dict()["variants"][1]["score"] == gelu.score.to_dict()
    assert found.rows()[1]["score"] == gelu.score.after


def test_where_it_fails_under_a_plan_that_is_the_plans_fault(parts):
    def fragile() -> float:
        parts.model.eval()
        parts.model(parts.test)
        if not parts.is_other:
            return 0.5
        raise ValueError("no tanh\nplease")

    found = benchmark(parts.infer, "baseline,tanh_gelu", budget_s=0.1, accuracy=fragile)
    told = "fragile raises ValueError: no tanh"
    assert found.records[1].score.failure.startswith(told)
    assert found.records[1].is_refused


def comparison(
    *scores: float, other: bool = True, speed: float = 2.0, baseline_is_other: bool = False
) -> Comparison:
    """Return what a plan gives whose score is the second; the others have the first."""
    times = [1.0 + i % 7 / 1000 for i in range(200)]
    before, after = [Scored("evaluate", scores[0], n) for n in scores] or [None] * 2
    records = [
        Record("baseline", times_s=times, score=before),
        Record("tanh_gelu", times_s=[one / speed for one in times], score=after),
        Record("bf16", times_s=[one / 1.2 for one in times], score=before),
    ]
    verdict = "other model" if other else "exact"
    records[1].accuracy = Accuracy(verdict, "", 0.012, 0.03, 0.999, 0.0, 0.0, loss_error=2e-4)
    records[1].changes_model = OTHER if other else {}
    if baseline_is_other:
        records[0].changes_model = records[2].changes_model = OTHER
    return Comparison(tuple(records), {"device": "a CPU", "torch": "2"}, 10.0, 0.01, 0.1)


def test_what_is_accepted_wins_and_the_report_says_what_was_given_up():
    found = comparison(0.912, 0.908)
    assert found.verdict(found.records[1]) == "accepted"
    assert found.best is found.records[1]
    shown = words(found)
    assert "tanh_gelu is 2.00× as fast as baseline" in shown
    assert "evaluate 0.912 → 0.908" in shown
    assert "accepted, 0.004 is given up, 0.0091 is allowed (1 % of the baseline's" in shown
    assert "higher is better" in shown
    assert "evaluate()" in repr(comparison_report(found))


@pytest.mark.parametrize("other", [True, False])
def test_what_gives_up_more_than_is_allowed_wins_by_no_speed(other):
    found = comparison(0.912, 0.85, other=other)
    assert found.verdict(found.records[1]) == "other model"
    assert found.best is found.records[2]
    assert "not accepted, 0.062 is given up, 0.0091 is allowed" in words(found)


FAULTS: dict[str, Callable[[Parts], Any]] = {
    "accuracy (raises RuntimeError|changes the model: 0.weight is another)": (
        lambda parts: (parts.train(), 0.5)[1]
    ),
    "accuracy changes the model: 1.running_mean is another after it; is model.eval": (
        lambda parts: (parts.model.train()(parts.test), 0.5)[1]
    ),
    "accuracy calls no model that the step uses": lambda parts: 0.5,
    "accuracy gives Tensor": lambda parts: parts.model.eval()(parts.test).mean(),
}


@pytest.mark.parametrize("told", FAULTS)
def test_what_can_be_no_measure_is_one_clear_line_and_everything_is_put_back(parts, told):
    before, accuracy = state(parts), lambda: FAULTS[told](parts)
    with pytest.raises(StepError, match=told) as error:
        benchmark(parts.infer, "baseline,tanh_gelu", budget_s=0.1, accuracy=accuracy)
    assert len(str(error.value).splitlines()) == 1
    assert state(parts) == before


def test_no_rule_turns_on_or_offers_what_changes_the_model():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.InstanceNorm2d(8, affine=True), nn.GELU())
    facts = replace(Facts.read(model, [torch.optim.AdamW(model.parameters())]), linears=4)
    changing = [entry for entry in CATALOG if entry.effect is Effect.CHANGES_MODEL]
    assert changing
    for machine in machines.names():
        hardware = Hardware.from_json(machine)
        for one in (facts, facts.moved("cuda:0"), facts.moved("xpu:0")):
            found = plan(hardware=hardware, facts=one)
            assert found.changes_model() == {}
            for entry in changing:
                assert not found[entry.name].active
                assert found[entry.name].worth_measuring is None
            tried = [name for single in candidates(hardware, one) for name in single.values]
            assert not {entry.name for entry in changing}.intersection(tried)


def test_the_fastest_is_not_the_best_where_it_is_another_model():
    found = comparison()
    assert [found.verdict(r) for r in found.records] == ["baseline", "other model", "faster"]
    assert found.best is found.records[2]
    shown = words(found)
    assert "changed 0.01" in shown
    assert "output off by 0.012, loss by 0.0002, gradients by 0.03" in shown
    assert "`%speedkit verify --plan tanh_gelu`" in shown
    assert "tanh_gelu: changes the results" in repr(comparison_report(found))
    record = found.records[1]
    assert gain_of(found, record, proven=True) == 0
    assert gain_of(found, record) == 0
    assert "another model" in why_not(found, record, "bf16")


def test_beside_a_baseline_that_is_the_same_other_model_it_is_a_variant_like_all():
    found = comparison(baseline_is_other=True)
    assert [found.verdict(r) for r in found.records] == ["baseline", "faster", "faster"]
