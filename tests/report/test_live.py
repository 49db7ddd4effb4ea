"""Progress as rows that keep their place, and reports that leave open what matters."""

from __future__ import annotations

import pytest

from speedkit_jupyter.measure.checks.accuracy import Accuracy
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.rounds.sampler import Progress, VariantStatus, statuses
from speedkit_jupyter.report.comparison_report import bar, comparison_report, live_report
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Row, Section, Table


def record(name: str, factor: float, rounds: int = 40, **more) -> Record:
    times = [0.01 * factor * (1 + i % 5 / 100) for i in range(rounds)]
    return Record(name, times, 0.5, **more)


def test_every_variant_has_its_standing_in_a_word():
    wrong = Accuracy("wrong", reason="its outputs are off")
    found = statuses(
        Comparison(
            (
                record("baseline", 1),
                record("fast", 0.7),
                record("slow", 1.4),
                record("close", 1.0),
                record("wrong", 0.5, accuracy=wrong),
                record("gone", 3.0, rounds=9),
                Record("broken", failure="RuntimeError: no"),
                Record("unseen"),
                Record("same", same_as_baseline=True),
            ),
            {},
            10,
        )
    )
    assert {one.name: one.state for one in found} == {
        "baseline": "baseline",
        "fast": "faster",
        "slow": "slower",
        "close": "same",
        "wrong": "wrong",
        "gone": "left the rounds",
        "broken": "failed",
        "unseen": "waiting",
        "same": "changes nothing",
    }
    fast = found[1]
    assert fast.low is not None
    assert fast.low <= fast.speedup <= fast.high


KNOWN = (
    VariantStatus("baseline", None, None, None, "baseline"),
    VariantStatus("bf16", 1.5, 1.4, 1.6, "faster"),
    VariantStatus("auto", 1.234, 1.2, 1.3, "faster"),
)


def test_the_table_has_a_row_for_each_variant():
    shown = live_report(Progress(0.5, "round 9", KNOWN), "3 variants").to_text()
    assert [one.split()[0] for one in shown.splitlines()[-3:]] == [one.name for one in KNOWN]
    assert "1.40× to 1.60×" in shown


@pytest.mark.parametrize("done", [0.0, 0.3, 0.99, 1.0, 7.0])
def test_the_bar_is_never_full_while_it_runs(done):
    assert bar(done).endswith("░")
    assert len(bar(done)) == len(bar(0.0))


# --- two lines that matter ---


def test_two_lines_stand_open_and_the_rest_is_folded():
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
    assert "<details open style" in report.to_page()


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
    assert '<span style="white-space:nowrap">--budget 30</span>' in html
    assert "<b>" not in html
