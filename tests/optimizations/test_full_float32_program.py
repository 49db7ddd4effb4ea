"""The program that measures what tuning gains in full float32: what it promises, and when."""

from __future__ import annotations

from functools import partial

import full_float32
import pytest
import torch

ROW = {
    "model": "MLP, training", "state": "one", "machine": "here", "gemm": 2.2, "plan": "gemm:onednn",
    "tuned_s": 20.0, "over_baseline": [1.6, 1.5, 1.7], "over_compile": [1.5, 1.4, 1.6],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "problems"),
    [
        ({}, 0),
        ({"over_compile": [1.2, 1.1, 1.3]}, 1),
        ({"over_baseline": [1.0, 0.9, 1.1], "over_compile": [1.0, 0.9, 1.1]}, 2),
        ({"over_compile": None}, 0),
        ({"over_baseline": [1.0, 0.9, 1.1], "gemm": 1.1}, 0),
    ],
)
def test_the_promise_is_made_where_onednn_is_faster(changed, problems):
    rows = [ROW | changed]
    assert len(full_float32.broken(rows)) == problems
    assert "not timed" in full_float32.table(rows) or changed.get("over_compile", 1)


def test_the_mean_is_geometric_and_over_the_newest_state():
    old = ROW | {"state": "older"}
    slow = ROW | {"model": "ViT, training", "over_baseline": [0.4, 0.3, 0.5]}
    rows = full_float32.newest([old, slow, ROW])
    assert [row["model"] for row in rows] == ["ViT, training", "MLP, training"]
    assert full_float32.means(rows)["over_baseline"] == pytest.approx(0.8)


@pytest.mark.slow
@pytest.mark.real_time
def test_a_model_is_tuned_without_lowering_precision(monkeypatch):
    from _workloads import training

    def small() -> object:
        torch.manual_seed(0)
        images = torch.rand(4, 8)
        return training(torch.nn.Linear(8, 2), images, torch.tensor([0, 1, 0, 1]))

    monkeypatch.setitem(full_float32.MODELS, "small", small)
    monkeypatch.setattr(full_float32, "BUDGET_S", 2.0)
    monkeypatch.setattr(full_float32, "tune", partial(full_float32.tune, budget_s=3.0))
    row = full_float32.measured("small")
    assert "bf16" not in row["plan"]
    assert "tf32" not in row["plan"]
    assert row["verdicts"]["compile"] not in ("failed", "wrong")
    assert row["over_compile"] or row["verdicts"]["compile"] == "too noisy"
    assert "small" in full_float32.table([ROW | row])
