"""What makes another model of it: by request only, measured, and never the winner by its speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, Hardware, benchmark, machines, plan
from speedkit_jupyter.measure.checks.accuracy import Accuracy
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.base.decision import Effect
from speedkit_jupyter.report.comparison_report import comparison_report
from speedkit_jupyter.tuning.aim import Aim
from speedkit_jupyter.tuning.candidates import candidates

OTHER = {"rewrites": {"enabled": True}}


def words(text: object) -> str:
    return " ".join(repr(text).split())


def training() -> tuple[nn.Module, torch.optim.Optimizer, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.rand(32, 6), torch.randint(3, (32,))

    def step() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


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


def comparison(speed: float = 2.0, baseline_is_other: bool = False) -> Comparison:
    times = [1.0 + i % 7 / 1000 for i in range(200)]
    records = [
        Record("baseline", times_s=times),
        Record("rewrites", times_s=[one / speed for one in times], changes_model=OTHER),
        Record("bf16", times_s=[one / 1.2 for one in times]),
    ]
    records[1].accuracy = Accuracy("other model", "", 0.012, 0.03, 0.999, 0.0, 0.0, loss_error=2e-4)
    if baseline_is_other:
        records[0].changes_model = records[2].changes_model = OTHER
    return Comparison(tuple(records), {"device": "a CPU", "torch": "2"}, 10.0, 0.01, 0.1)


def test_the_fastest_is_not_the_best_where_it_is_another_model():
    found = comparison()
    assert [found.verdict(r) for r in found.records] == ["baseline", "other model", "faster"]
    assert found.best is found.records[2]
    assert found.runner_up() is None
    shown = words(found)
    assert "changed 0.01" in shown
    assert "output off by 0.012, loss by 0.0002, gradients by 0.03" in shown
    assert "`%speedkit verify --plan rewrites`" in shown
    assert "rewrites: changes the results" in repr(comparison_report(found))
    record = found.records[1]
    for aim in (Aim(), Aim(memory=True)):
        assert aim.gain(found, record, proven=True) == 0
        assert aim.gain(found, record) == 0
        assert "another model" in aim.why_not(found, record, "bf16")


@pytest.mark.parametrize(("speed", "word"), [(0.5, "slower"), (1.0, "same")])
def test_what_is_not_faster_is_no_more_than_that(speed, word):
    found = comparison(speed)
    assert found.verdict(found.records[1]) == word
    assert found.runner_up() is None


def test_beside_a_baseline_that_is_the_same_other_model_it_is_a_variant_like_all():
    found = comparison(baseline_is_other=True)
    assert [found.verdict(r) for r in found.records] == ["baseline", "faster", "faster"]
    assert Comparison.from_dict(found.to_dict()).to_dict() == found.to_dict()


def test_a_benchmark_says_what_is_given_up_and_compares_its_own_precision_as_ever():
    model, _, step = training()
    found = benchmark(
        step, "baseline,rewrites:gelu,rewrites:instance_norm,fused_optimizer", budget_s=0.2
    )
    gelu, fused = found.records[1], found.records[3]
    assert gelu.accuracy.verdict == "other model"
    assert 1e-6 < gelu.accuracy.output_error < 1e-2
    assert gelu.accuracy.loss_error is not None
    assert gelu.accuracy.gradient_error is not None
    assert gelu.changes_model
    assert not fused.changes_model
    assert found.records[2].declined  # it has none
    assert "1.act" not in gelu.notes.get("rewrites", "1: GELU -> tanh")
    assert model[1].approximate == "none"
    again = Comparison.from_dict(found.to_dict())
    assert again.verdict(again.records[1]) == found.verdict(gelu)
