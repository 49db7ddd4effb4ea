"""The program that measures each entry of the catalog: what it measures, keeps and promises."""

from __future__ import annotations

import json
from types import SimpleNamespace

import catalog
import pytest
import torch
from _catalog_models import MODELS, made

from speedkit_jupyter import Facts
from speedkit_jupyter.measure.subject.variants import variant
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.tuning.candidates import Candidate

FOUND = {"verdict": "slower", "speedup": 0.9, "low": 0.88, "high": 0.92, "accuracy": "exact"}
ROW = {
    "model": "MLP, training", "entry": "fused_optimizer", "state": "one", "device": "cpu",
    "machine": "here", "auto": "fused_optimizer", "declined": {}, "baseline_bytes": 100,
    "measured": {"fused_optimizer": FOUND | {"peak_bytes": 50}},
}  # fmt: skip


@pytest.mark.parametrize("entry", CATALOG, ids=lambda one: one.name)
@pytest.mark.parametrize("name", ["cpu", "t4", "epyc_avx512"])
def test_every_value_of_an_entry_is_a_word_once(entry, name, hardware):
    machine, facts = hardware(name), Facts(convolutions=1, parameters=1)
    found = [*catalog.words(entry, machine, facts, None)]
    values = [getattr(variant(word).config, entry.name) for word in found]
    assert all(value not in values[:index] for index, value in enumerate(values))
    for value in entry.candidates(machine, facts):
        config = getattr(variant(catalog.Candidate({entry.name: value}).name).config, entry.name)
        assert config in values


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, ["0.90 times"]),
        ({"speedup": 0.985}, []),
        ({"verdict": "too noisy"}, []),
        ({"speedup": 1.5, "verdict": "wrong"}, ["wrong"]),
        ({"verdict": "failed"}, ["failed"]),
    ],
)
def test_what_auto_takes_must_be_no_loss_and_right(changed, says):
    row = ROW | {"measured": {"fused_optimizer": FOUND | changed}}
    found = catalog.broken(row)
    assert len(found) == len(says)
    assert all(word in line for word, line in zip(says, found, strict=True))
    assert not catalog.broken(row | {"auto": None})


def test_the_table_has_speed_memory_accuracy_verdict_and_what_the_winner_loses_without_it():
    best = {
        "model": "MLP, training", "entry": catalog.WINNER, "state": "one", "device": "cpu",
        "machine": "here", "plan": "fused_optimizer", "over_baseline": FOUND,
        "without": {"fused_optimizer": [1.2, 1.1, 1.3]},
    }  # fmt: skip
    noted = {"verdict": "too noisy", "why": "left out: too short"}
    bf16 = ROW | {"entry": "precision", "auto": None, "measured": {"bf16": noted}}
    refused = ROW | {"entry": "sdpa", "measured": {}, "declined": {"a": "no GPU", "b": "no GPU"}}
    failed = {key: ROW[key] for key in ("model", "entry", "state", "device")}
    rows = json.loads(json.dumps([ROW, best, refused, bf16, failed | {"failed": "KeyError: x"}]))
    table = catalog.tables(rows)
    line = "`fused_optimizer` | yes | 0.90× [0.88, 0.92] | 50 % | exact | slower | 1.20× [1.10, "
    assert line in table
    assert "| `a`, `b` |  | – |  |  | no GPU |  |" in table
    assert "| `bf16` |  | – |  |  | left out: too short |  |" in table
    assert "failed: KeyError: x" in table
    assert "**fused_optimizer**" in table
    assert "auto takes fused_optimizer" in table


@pytest.mark.slow
def test_an_entry_is_measured_alone_and_declined_with_its_reason():
    work = made("rollout, training", "cpu")
    entries = {entry.name: entry for entry in CATALOG}
    row = catalog.alone(work, entries["fused_optimizer"], 0.2)
    assert row["auto"] == "fused_optimizer"
    assert set(row["measured"]) == {"fused_optimizer"}
    assert {"verdict", "speedup", "low"} <= row["measured"]["fused_optimizer"].keys()
    refused = catalog.alone(work, entries["sdpa"], 0.2)
    assert "CUDA kernel" in refused["declined"]["sdpa:flash"]
    assert set(refused["measured"]) == {"sdpa:math"}


@pytest.mark.slow
def test_the_winner_is_measured_without_each_of_its_parts(monkeypatch):
    best = Candidate({"threads": 1, "fused_optimizer": True})
    found = SimpleNamespace(winner=best, seconds=1.0)
    monkeypatch.setattr(catalog, "tune", lambda *args, **more: found)
    row = catalog.winner(made("rollout, training", "cpu"), 0.2)
    assert row["plan"] == best.name
    assert row["over_baseline"]["speedup"] > 0
    assert set(row["without"]) == {"threads", "fused_optimizer"}
    assert all(len(one) == 3 and one[0] > 0 for one in row["without"].values())


def test_a_model_that_fails_is_a_row_that_says_so(monkeypatch):
    def breaks(*args):
        raise KeyError("x")

    monkeypatch.setattr(catalog, "alone", breaks)
    row = catalog.one_row("rollout, training", "sdpa", "cpu", 0.1)
    assert row == {"model": "rollout, training", "entry": "sdpa", "failed": "KeyError: 'x'"}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_each_model_takes_a_step(name):
    work = made(name, "cpu")
    before = [p.detach().clone() for p in work.model.parameters()]
    result = work.step(work.model, work.optimizer)
    moved = any(not torch.equal(a, b) for a, b in zip(before, work.model.parameters(), strict=True))
    assert moved == (work.optimizer is not None)
    assert work.optimizer is not None or result.isfinite().all()
