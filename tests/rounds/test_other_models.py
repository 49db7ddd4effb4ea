"""Plans that change the model never win by speed; the user's own accuracy figure is shown."""

import math
from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, Hardware, StepError, benchmark, machines, optimization, plan
from speedkit_jupyter.catalog import CATALOG, named
from speedkit_jupyter.catalog.base.decision import Effect
from speedkit_jupyter.extras.kernels import custom
from speedkit_jupyter.report.comparison_report import comparison_report
from speedkit_jupyter.right.judge import Accuracy
from speedkit_jupyter.rounds.comparison import Comparison, Record
from speedkit_jupyter.search.candidates import candidates
from speedkit_jupyter.search.tried_plans import TimedPlan

OTHER = {"tanh_gelu": True}


def tanh_gelu(module: nn.GELU, x: torch.Tensor) -> torch.Tensor:
    """Approximate GELU by tanh."""
    return nn.functional.gelu(x, approximate="tanh")


@pytest.fixture
def other_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add a catalog entry that changes the model's arithmetic."""
    optimization("tanh_gelu", replaces=nn.GELU)(tanh_gelu)
    monkeypatch.setattr(type(named("tanh_gelu")), "effect", Effect.CHANGES_MODEL)
    yield
    custom.forget("tanh_gelu")


def words(text: object) -> str:
    return " ".join(repr(text).split())


class Parts:
    """Classifier of points with its optimizer, inference step, and test data."""

    def __init__(self) -> None:
        layers = nn.Linear(4, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 2)
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.x, self.test = torch.rand(64, 4), torch.rand(200, 4)
        self.truth = (self.test.sum(1) > 2).long()
        self.seen = SimpleQueue[Any]()

    def infer(self) -> torch.Tensor:
        with torch.no_grad():
            return self.model(self.x)

    @property
    def is_other(self) -> bool:
        return "forward" in vars(self.model[2])

    def right(self) -> float:
        self.model.eval()
        self.seen.put(self.is_other)
        return float((self.model(self.test).argmax(1) == self.truth).float().mean())


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
    assert [parts.seen.get_nowait() for _ in range(parts.seen.qsize())] == [False, True]
    assert all(0 < record.score <= 1 for record in found.records)
    assert "right" in words(found)
    assert found.rows()[1]["score"] == found.records[1].score


def test_it_is_called_with_the_model_if_it_takes_one_argument(parts):
    given = SimpleQueue[Any]()
    accuracy = lambda net, batches=3: (given.put(net), 0.5)[1]  # noqa: E731
    benchmark(parts.infer, "baseline", budget_s=0.1, accuracy=accuracy)
    assert given.get() is parts.model


def test_its_error_under_a_plan_is_a_line_of_the_plan(parts):
    def fragile() -> float:
        if not parts.is_other:
            return 0.5
        raise ValueError("no tanh\nplease")

    found = benchmark(parts.infer, "baseline,tanh_gelu", budget_s=0.1, accuracy=fragile)
    assert found.records[1].score is None
    assert found.records[1].notes["fragile"] == "fragile raises ValueError: no tanh"


def comparison(baseline_is_other: bool = False) -> Comparison:
    """Return a comparison whose fastest plan changes the model."""
    times = [1.0 + i % 7 / 1000 for i in range(200)]
    records = [
        Record("baseline", times_s=times),
        Record("tanh_gelu", times_s=[one / 2 for one in times], changes_model=OTHER),
        Record("bf16", times_s=[one / 1.2 for one in times]),
    ]
    records[1].accuracy = Accuracy("other model", "", 0.012, 0.03, 0.999, 0.0, 0.0, loss_error=2e-4)
    if baseline_is_other:
        records[0].changes_model = records[2].changes_model = OTHER
    return Comparison(tuple(records), {"device": "a CPU", "torch": "2"}, 10.0, 0.01, 0.1)


NO_ACCURACY: dict[str, Any] = {
    "accuracy returns Tensor, not a number": lambda: torch.tensor(0.5),
    "accuracy returns bool": lambda: True,
    "accuracy returns nan": lambda: math.nan,
    "accuracy raises ZeroDivisionError": lambda: 1 / 0,
    "accuracy takes 2 arguments": lambda net, data: 0.5,
    "the accuracy must be a function that returns a number, not int": 3,
}


@pytest.mark.parametrize("told", NO_ACCURACY)
def test_an_invalid_accuracy_is_one_clear_line_and_everything_is_put_back(parts, told):
    before = state(parts)
    with pytest.raises(StepError, match=told) as error:
        benchmark(parts.infer, "baseline", budget_s=0.1, accuracy=NO_ACCURACY[told])
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
            tried = [name for single in candidates(hardware, [one]) for name in single.values]
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
    other = TimedPlan(found, found.records[1])
    assert other.gain(proven=True) == other.gain() == 0
    assert "another model" in other.why_not("bf16")
