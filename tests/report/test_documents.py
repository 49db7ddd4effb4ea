"""Documents as text and HTML, and the units in them."""

from __future__ import annotations

import math

import pytest

from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.rounds.sampler import Progress, VariantStatus
from speedkit_jupyter.report import units
from speedkit_jupyter.report.comparison_report import (
    comparison_report,
    comparison_table,
    live_report,
)
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Cell, Code, Row, Section, Table


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.345, "2.35 s"), (0.0452, "45.2 ms"), (3.1e-4, "310 µs"), (5e-9, "5 ns"), (0.0, "0 ns")],
)
def test_seconds_are_shown_as_people_read_them(value, text):
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(15 * 2**30, "15 GiB"), (3 * 2**20, "3 MiB"), (1012.6 * 2**10, "1010 KiB"), (12, "12 B")],
)
def test_bytes_are_shown_as_people_read_them(value, text):
    assert units.size(value) == text


def test_a_table_keeps_to_its_width_and_wraps_its_last_column(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    table = Table(("name", "why"), (Row(("a", "many words " * 20)),))
    lines = Document("Title", (Section(table),)).to_text().splitlines()
    assert max(map(len, lines)) <= 60


def test_html_escapes_everything_and_shows_code_in_backticks():
    table = Table(("<a>",), (Row(("<b> `x < y`",)),))
    html = Document("<c>", (Section(table), Section(Code("<d>")))).to_html()
    for tag in ("<a>", "<b>", "<c>", "<d>"):
        assert tag not in html
    assert "x &lt; y</code>" in html


def record(name: str, factor: float, **more) -> Record:
    return Record(name, [0.01 * factor * (1 + i % 5 / 100) for i in range(40)], 0.5, **more)


def test_several_ratios_come_with_a_plot_in_html_only():
    records = (record("baseline", 1), record("a", 0.9), record("b", 1.1))
    report = comparison_report(Comparison(records, {}, 10))
    assert "data:image/png;base64," in report.to_html()
    assert "image" not in report.to_text()


def columns(comparison: Comparison) -> tuple[str, ...]:
    return comparison_table(comparison).columns


def test_the_verdict_stands_second_and_columns_of_dashes_are_left_out():
    rows = (record("baseline", 1), record("auto", 0.8))
    assert columns(Comparison(rows, {}, 10)) == (
        "variant", "verdict", "median", "speed-up", "95 % interval", "first call"
    )  # fmt: skip


def test_variants_that_were_left_out_for_one_reason_share_a_row():
    left = [
        Record(f"v{number}", [], None, notes={"left out": "budget too short"})
        for number in range(6)
    ]
    table = comparison_table(Comparison((record("baseline", 1), record("a", 0.8), *left), {}, 10))
    assert [row.cells[:2] for row in table.rows] == [
        ("baseline", "baseline"),
        ("a", "faster"),
        ("v0, v1, v2, v3, v4, v5", "left out: budget too short"),
    ]


@pytest.mark.parametrize(("factor", "word"), [(1.004, "no gain"), (1.3, "slower"), (0.8, "faster")])
def test_what_takes_as_long_within_2_percent_is_not_called_slower(factor, word):
    comparison = Comparison((record("baseline", 1), record("a", factor)), {}, 10)
    assert comparison_table(comparison).rows[1].cells[1] == word


def test_no_table_shows_an_interval_without_ends():
    few = Record("a", [0.01] * 3, 0.5)
    comparison = Comparison((Record("baseline", [0.01] * 3, 0.5), few), {}, 10)
    assert "inf" not in comparison_report(comparison).to_text()
    status = VariantStatus("a", 1.2, 0.0, math.inf, "too noisy")
    assert "inf" not in live_report(Progress(0.5, "round 3", (status,))).to_text()
    assert units.between(0.0, math.inf) == "too few rounds"


def test_a_head_says_what_its_word_means():
    comparison = Comparison((record("baseline", 1), record("auto", 0.8)), {}, 10)
    html = comparison_report(comparison).to_html()
    assert 'title="How long the first step took' in html


def test_code_in_a_cell_is_monospaced_and_keeps_its_backticks():
    table = Table(("line",), (Row((Cell("x = `a` < b", code=True),)),))
    assert "monospace" in Document("", (Section(table),)).to_html()
    assert "x = `a` &lt; b" in Document("", (Section(table),)).to_html()
