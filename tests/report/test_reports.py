"""Check reports as text and HTML: units, tables, folded lines and the progress bar."""

import math
import re
from html import unescape

import pytest
import torch

from speedkit_jupyter import benchmark
from speedkit_jupyter.report import rendering
from speedkit_jupyter.report.comparison_report import (
    comparison_report,
    comparison_table,
    live_report,
)
from speedkit_jupyter.report.elements import CodeBlock, Row, Section, Table, TableCell
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.right.judge import Accuracy
from speedkit_jupyter.rounds.comparison import Comparison, Progress, Record
from speedkit_jupyter.rounds.statistics import INTERVAL
from speedkit_jupyter.search.tried_plans import TimedPlan
from speedkit_jupyter.support import units


def record(name: str, factor: float, rounds: int = 40, **more) -> Record:
    return Record(name, [0.01 * factor * (1 + i % 5 / 100) for i in range(rounds)], 0.5, **more)


@pytest.mark.parametrize(
    ("unit", "shown"),
    [
        (units.seconds, {2.345: "2.35 s", 0.0452: "45.2 ms", 3.1e-4: "310 µs", 0.0: "0 ns"}),
        (units.size, {15 * 2**30: "15 GiB", 1012.6 * 2**10: "1010 KiB", 12: "12 B"}),
    ],
)
def test_seconds_and_bytes_are_shown_as_people_read_them(unit, shown):
    assert {value: unit(value) for value in shown} == shown


def test_a_table_keeps_to_its_width_and_wraps_its_last_column(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    table = Table(("name", "why"), (Row(("a", "many words " * 20)),))
    assert max(map(len, Document("Title", (Section(table),)).to_text().splitlines())) <= 60


def test_html_escapes_everything_and_shows_code_in_backticks_and_in_cells():
    table = Table(("<a>",), (Row(("<b> `x < y`",)), Row((TableCell("`a` < b", code=True),))))
    html = Document("<c>", (Section(table), Section(CodeBlock("<d>")))).to_html()
    for tag in ("<a>", "<b>", "<c>", "<d>"):
        assert tag not in html
    assert "x &lt; y</code>" in html
    assert 'pre-wrap">`a` &lt; b</code>' in html


def test_the_headline_names_the_fastest_the_verdict_is_second_and_empty_columns_are_left_out():
    found = Comparison((record("baseline", 1), record("auto", 0.8)), {}, 10)
    columns = ("variant", "verdict", "median", "speed-up", "95 % interval", "first call")
    assert comparison_table(found).columns == columns
    assert comparison_report(found).headline.startswith("auto is 1.25× as fast as baseline")


@pytest.mark.parametrize(("factor", "word"), [(1.004, "no gain"), (1.3, "slower"), (0.8, "faster")])
def test_what_takes_as_long_within_2_percent_is_not_called_slower(factor, word):
    comparison = Comparison((record("baseline", 1), record("a", factor)), {}, 10)
    assert comparison_table(comparison).rows[1].cells[1] == word


def test_no_table_shows_an_interval_without_ends():
    few = Record("a", [0.01] * 3, 0.5)
    comparison = Comparison((Record("baseline", [0.01] * 3, 0.5), few), {}, 10)
    assert "inf" not in comparison_report(comparison).to_text()
    assert "inf" not in live_report(Progress(0.5, "round 3", comparison)).to_text()
    assert units.between(0.0, math.inf) == "too few rounds"


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
        assert TimedPlan(found, record).why_not("baseline").startswith("declined: ")


def test_the_table_says_why_in_short_and_the_notes_in_full(found, monkeypatch):
    for columns in ("80", "100", "140"):
        monkeypatch.setenv("COLUMNS", columns)
        text, html = found.report().to_text(), found.report().to_html()
        read = unescape(re.sub("<[^>]*>", "", html))
        assert max(map(len, text.splitlines())) <= int(columns)
        for name, reason in DECLINED.items():
            assert f"{name}" in text
            assert f"declined: {reason}" in read
        assert "failed" not in text + html
    assert "on a CPU torch uses its own fused one already" in " ".join(text.split())


@pytest.mark.parametrize("width", [60, 70, 80, 100, 120])
@pytest.mark.parametrize("name", ["bf16", "bf16+channels_last+fused_optimizer", "code" * 18])
def test_columns_wrap_and_then_leave_until_the_table_fits(width, name):
    columns = ("variant", "median", INTERVAL, "memory", "first call", "why")
    rows = (Row((name, "12.7 ms", "1.015× to 1.05×", "13.2 MiB", "75.6 ms", "it is so " * 9)),)
    table = Table(columns, rows, columns[1:5], ("variant", INTERVAL), ("memory", "first call"))
    lines = rendering.table(table, width).splitlines()
    assert max(map(len, lines)) <= width
    shown = " ".join(" ".join(lines).split())
    assert "12.7 ms" in shown
    assert shown.count("it") == 9
    assert ("first call" in lines[0]) == (width >= 80) or "+" not in name


@pytest.mark.parametrize("done", [0.0, 0.99, 7.0])
def test_the_bar_is_never_full_while_it_runs(done):
    shown = live_report(Progress(done, "round 9"), "9 variants")
    assert "100" not in shown.to_text() + shown.to_html()


def test_every_variant_has_its_standing_in_a_word():
    standings = [
        (record("baseline", 1), "baseline"),
        (record("fast", 0.7), "faster"),
        (record("slow", 1.4), "slower"),
        (record("close", 1.0), "no gain"),
        (record("off", 0.5, accuracy=Accuracy("wrong", reason="its outputs are off")), "wrong"),
        (record("gone", 3.0, rounds=9), "slower than the best, dropped"),
        (Record("broken", failure="RuntimeError: no"), "failed"),
        (Record("unseen"), "waiting"),
        (Record("same", same_as_baseline=True), "changes nothing"),
    ]
    found = Comparison(tuple(record for record, _ in standings), {}, 10)
    rows = live_report(Progress(0.5, "round 9", found), "9 variants").content[1].rows
    assert [row.cells[-1] for row in rows] == [word for _, word in standings]
    assert rows[1].cells[1:3] == ("1.43×", "1.43× to 1.43×")
    assert "failed: RuntimeError: no" in " ".join(comparison_report(found).to_text().split())


def test_lines_that_decide_nothing_are_folded():
    records = [record("baseline", 1)]
    for name in ("a", "b", "c"):
        notes = {"sdpa": "declined: no", "compile": "declined: no"}
        records.append(record(name, 0.8, notes=notes, applied={"precision": "bf16"}))
    report = comparison_report(Comparison(tuple(records), {}, 10))
    brief, whole = report.brief().to_text(), report.to_text()
    assert "more notes: `%speedkit report --notes`" in brief
    assert brief.count("declined") < whole.count("declined") == 6
    assert "Median time of one step" in whole
    assert "Median time of one step" not in brief
    assert "<details style" in report.brief().to_html()
    assert "<details open style" in report.to_html()


def test_a_wrong_variant_is_never_folded_away():
    records = [record("baseline", 1)]
    for name in "abcdef":
        wrong = Accuracy("wrong", reason=f"{name} is off")
        records.append(record(name, 0.8, accuracy=wrong, applied={"precision": "bf16"}))
    brief = comparison_report(Comparison(tuple(records), {}, 10)).brief().to_text()
    for name in "abcdef":
        assert f"{name} is off" in brief


def test_wide_tables_break_where_a_reader_would():
    table = Table(("plan", "why"), (Row(("bf16+compile", "with --budget 30 more")),), (), ("plan",))
    html = Document("", (Section(table), Section("<b>", folded=True))).to_html()
    assert "bf16+<wbr>compile" in html
    assert "<b>" not in html
