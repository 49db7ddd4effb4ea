"""Every kind of result saves its table as CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark, tune, verify
from speedkit_jupyter.measure.results.timing import Timing


def measured(kind: str) -> Any:
    """A result of a step of two layers and its optimizer."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    x = torch.rand(8, 4)

    def step() -> torch.Tensor:
        loss = network(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    made: dict[str, Callable[[], Any]] = {
        "comparison": lambda: benchmark(step, "baseline,fused_optimizer,threads:1", budget_s=0.1),
        "tuning": lambda: tune(step, budget_s=0.3),
        "verification": lambda: verify(step, "bf16", steps=3),
        "timing": lambda: Timing(1, [0.1, 0.2], [0.1, 0.1]),
    }
    return made[kind]()


@pytest.mark.usefixtures("made_time")
@pytest.mark.parametrize(
    ("kind", "columns", "rows"),
    [
        ("comparison", {"name", "verdict", "speedup", "median_s", "accuracy", "peak_bytes"}, 3),
        ("tuning", {"stage", "name", "verdict", "speedup", "low", "high"}, None),
        ("timing", {"name", "median_s", "low_s", "loops"}, 1),
        ("verification", {"compared", "step", "baseline", "planned", "other_seed"}, 3),
    ],
)
def test_a_result_saves_its_table_with_the_same_columns_in_each_row(
    tmp_path: Path, kind: str, columns: set[str], rows: int | None
) -> None:
    result = measured(kind)
    if kind == "comparison":  # it knows what repeats it
        assert "loss.backward()" in result.command
        assert "benchmark(step, 'baseline,fused_optimizer,threads:1', budget_s" in result.command
    with result.save(tmp_path / "table.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    assert columns <= set(table[0])
    assert len(table) == (len(result.rows()) if rows is None else rows)
    assert all(None not in row and None not in row.values() for row in table)
    assert not any(value.startswith(("[", "{")) for row in table for value in row.values())
    assert [str(row.get("name")) for row in table] == [str(r.get("name")) for r in result.rows()]
