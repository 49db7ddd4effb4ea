"""Documents as text and HTML, and the units in them."""

from __future__ import annotations

import pytest

from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.report import units
from speedkit_jupyter.report.comparison_report import comparison_report
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Code, Row, Section, Table


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


def test_a_table_without_names_of_columns_has_no_head():
    document = Document("Title", (Section(Table(("", ""), (Row(("a", "1")), Row(("b", "2"))))),))
    assert document.to_text().splitlines()[-2:] == ["a  1", "b  2"]
    assert "─" not in document.to_text()
    assert "<thead" not in document.to_html()


def test_html_escapes_everything_and_shows_code_in_backticks():
    table = Table(("<a>",), (Row(("<b> `x < y`",)),))
    html = Document("<c>", (Section(table), Section(Code("<d>")))).to_html()
    for tag in ("<a>", "<b>", "<c>", "<d>"):
        assert tag not in html
    assert "x &lt; y</code>" in html


def record(name: str, factor: float, **more) -> Record:
    return Record(name, [0.01 * factor * (1 + i % 5 / 100) for i in range(40)], 0.5, **more)


def test_the_headline_names_the_fastest_that_is_proven():
    comparison = Comparison((record("baseline", 1), record("auto", 0.8)), {}, 10)
    report = comparison_report(comparison)
    assert report.headline.startswith("auto is 1.25× as fast as baseline")
    assert report.to_dict()["variants"][1]["verdict"] == "faster"


def test_of_a_loose_interval_the_headline_says_what_is_proven_and_no_more():
    loose = Record("auto", [0.008 if i % 3 else 0.0005 for i in range(60)])
    comparison = Comparison((Record("baseline", [0.01] * 60), loose), {}, 10)
    assert "auto is 1.25× as fast" in comparison_report(comparison).headline
    looser = Record("auto", [0.008 if i % 2 else 0.0005 for i in range(60)])
    comparison = Comparison((Record("baseline", [0.01] * 60), looser), {}, 10)
    assert "auto is at least 1.25× as fast" in comparison_report(comparison).headline


def test_the_headline_admits_that_nothing_is_faster():
    comparison = Comparison((record("baseline", 1), record("auto", 1.3)), {}, 10)
    assert comparison_report(comparison).headline.startswith("Nothing is proven faster")


def test_several_ratios_come_with_a_plot_in_html_only():
    records = (record("baseline", 1), record("a", 0.9), record("b", 1.1))
    report = comparison_report(Comparison(records, {}, 10))
    assert "data:image/png;base64," in report.to_html()
    assert "image" not in report.to_text()


def test_a_failed_variant_keeps_its_row():
    failed = Record("bf16", failure="RuntimeError: out of memory")
    report = comparison_report(Comparison((record("baseline", 1), failed), {}, 10))
    assert "failed: RuntimeError: out of memory" in " ".join(report.to_text().split())
