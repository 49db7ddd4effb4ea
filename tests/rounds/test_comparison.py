"""Check the verdicts of comparisons, and saved results."""

import json
import random
import re

import pytest

from speedkit_jupyter import SpeedKitError
from speedkit_jupyter.right.judge import Accuracy
from speedkit_jupyter.rounds.budget import Compilations
from speedkit_jupyter.rounds.comparison import Comparison, Record
from speedkit_jupyter.rounds.timing import Timing
from speedkit_jupyter.step.memory import MemoryUse

ENVIRONMENT = {"device": "a CPU", "torch": "2.13.0"}


def comparison(**speeds: float) -> Comparison:
    """Return a comparison of variants with these speed-ups. A round's noise is mostly shared."""
    order = random.Random(0)
    noise = [order.uniform(1, 2) for _ in range(200)]
    records = [Record("baseline", times_s=list(noise))]
    for name, speed in speeds.items():
        times = [one / speed * order.uniform(0.99, 1.01) for one in noise]
        records.append(Record(name, times_s=times))
    return Comparison(tuple(records), dict(ENVIRONMENT), 10.0, error=0.01, round_s=0.1)


def test_the_best_is_the_fastest_that_is_right_or_none():
    found = comparison(good=1.2, wrong=3.0, slow=0.8)
    found.records[2].accuracy = Accuracy("wrong", "output off by 1")
    assert found.best is found.records[1]
    assert [*map(found.verdict, found.records)] == ["baseline", "faster", "wrong", "slower"]
    none = comparison(slow=0.8)
    assert none.best is None
    assert "Nothing is proven faster" in repr(none)


@pytest.mark.parametrize(("threads", "seconds", "widens"), [(2, 2e-3, 1), (1, 2e-3, 0), (2, 1, 0)])
def test_in_another_process_short_steps_may_be_farther_apart(threads, seconds, widens):
    found = comparison(good=1.2)
    found.environment.update(threads=threads)
    for record in found.records:
        record.times_s = [seconds * one for one in record.times_s]
    here, anywhere = found.ratio(found.records[1]), found.in_any_process(found.records[1])
    assert here.low > anywhere.low > 1 - widens
    assert (anywhere.low < 1 < here.low) is bool(widens)


def test_break_even_counts_the_steps_that_pay_for_compiling():
    found = comparison(compile=2.0)
    record = found.records[1]
    record.applied = {"compile": True}
    record.settling_s = 15.0
    record.compilations = Compilations(graphs=2)
    saved_per_step = sorted(found.baseline.times_s)[100] / 2
    assert found.break_even_steps(record) == pytest.approx(15.0 / saved_per_step, rel=0.05)
    assert "compiled 2 graphs; its 15 s are paid back after" in " ".join(repr(found).split())


def everything() -> Comparison:
    found = comparison(auto=1.3, failing=1.0)
    auto, failing = found.records[1:]
    auto.accuracy = Accuracy("rounding", "", 0.01, 0.02, 0.999, 1e-7, 2e-7)
    auto.memory = MemoryUse(3 * 2**20, 2**20)
    auto.applied, auto.plan = {"precision": "bf16"}, {"precision": "bf16"}
    auto.notes = {"compile": "declined: no compiler"}
    failing.failure, failing.times_s = "RuntimeError: no", []
    return found


def test_saved_json_holds_the_raw_samples_and_what_was_checked(tmp_path):
    found = everything()
    baseline, auto, failing = json.loads(found.save(tmp_path / "a.json").read_text())["variants"]
    assert baseline["times_s"] == found.baseline.times_s
    assert (auto["accuracy"]["verdict"], auto["verdict"]) == ("rounding", "faster")
    assert failing["failure"] == "RuntimeError: no"


def test_a_saved_page_needs_nothing_else(tmp_path):
    found = everything()
    found.records[1].notes["compile"] = "</script><b>not markup</b>"
    text = found.save(tmp_path / "found.html").read_text()
    assert "http" not in re.sub(r'http-equiv|<a href="[^"]*"', "", text)
    assert "<b>not markup" not in text


@pytest.mark.parametrize("name", ["found.txt", "found", "nowhere/found.json"])
def test_a_name_that_cannot_be_written_is_one_line(tmp_path, name):
    with pytest.raises(SpeedKitError, match="found"):
        everything().save(tmp_path / name)


@pytest.mark.parametrize(
    ("make", "columns"),
    [(everything, "name verdict speedup median_s accuracy peak_bytes score"),
     (lambda: Timing(1, [0.1, 0.2]), "name median_s low_s loops")],
)  # fmt: skip
def test_a_result_is_a_table_with_the_same_columns_in_each_row(make, columns):
    rows, columns = make().rows(), {*columns.split()}
    assert all(columns <= row.keys() == rows[0].keys() for row in rows)
    assert not any(isinstance(value, list | dict) for row in rows for value in row.values())
