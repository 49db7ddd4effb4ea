"""What can't be had stands in the table as declined, in short, and the table fits the page."""

from __future__ import annotations

import pytest
import torch

from speedkit_jupyter import benchmark
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.statistics import INTERVAL
from speedkit_jupyter.report import document
from speedkit_jupyter.report.elements import Row, Table
from speedkit_jupyter.tuning.aim import Aim

DECLINED = {
    "sdpa:flash": "'flash' is a CUDA kernel",
    "device:cuda": "this machine has no cuda",
    "tf32:high": "'high' changes nothing on a CPU",
    "cudnn_benchmark": "cuDNN does not run on cpu",
}


@pytest.fixture(scope="module")
def found():
    model, x = torch.nn.Linear(8, 8), torch.rand(4, 8)
    names = ["baseline", *DECLINED, "threads:1"]
    return benchmark(lambda: model(x), names, model=model, budget_s=0.05)


def test_a_wish_that_is_declined_is_no_failure(found):
    for record in found.records[1:-1]:
        assert found.verdict(record) == "declined"
        assert Aim().why_not(found, record, "baseline").startswith("declined: ")
    again = Comparison.from_dict(found.to_dict())
    assert [again.verdict(one) for one in again.records] == [
        found.verdict(one) for one in found.records
    ]


def test_the_table_says_why_in_short_and_the_notes_in_full(found, monkeypatch):
    for columns in ("80", "100", "140"):
        monkeypatch.setenv("COLUMNS", columns)
        text, html = found.report().to_text(), found.report().to_html()
        assert max(map(len, text.splitlines())) <= int(columns)
        for name, reason in DECLINED.items():
            assert f"{name}" in text
            assert f"declined: {reason}" in html.replace("&#x27;", "'")
        assert "failed" not in text + html
    assert "on a CPU torch uses its own fused one already" in " ".join(text.split())


@pytest.mark.parametrize("width", [60, 70, 80, 100, 120])
@pytest.mark.parametrize(
    "name", ["bf16", "bf16+channels_last+fused_optimizer+threads:1+tf32:medium"]
)
def test_columns_wrap_and_then_leave_until_the_table_fits(width, name):
    columns = ("variant", "median", INTERVAL, "memory", "first call", "why")
    rows = (Row((name, "12.7 ms", "1.015× to 1.05×", "13.2 MiB", "75.6 ms", "it is so " * 9)),)
    table = Table(columns, rows, columns[1:5], ("variant", INTERVAL), ("memory", "first call"))
    lines = document.table(table, width).splitlines()
    assert max(map(len, lines)) <= width
    shown = " ".join(" ".join(lines).split())
    assert "12.7 ms" in shown
    assert shown.count("it") == 9
    assert ("first call" in lines[0]) == (width >= 80) or name == "bf16"
