"""Reports about saved results: what there is, and how it compares with the newest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from speedkit_jupyter.measure.results.statistics import Ratio, ratio_between_runs, spread
from speedkit_jupyter.report.comparison_columns import CHANGES
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Row, Section, Table, Tone
from speedkit_jupyter.report.units import day, ratio, seconds
from speedkit_jupyter.support.database import Saved
from speedkit_jupyter.support.words import count

SAME_WHERE = ("device", "torch")
# Of these the speed is not all that is to be known.
NOT_THE_SAME = ("accepted", "other model", "wrong", "not checked")
EARLIER = "of an earlier version of SpeedKit"


def history_list(results: Sequence[Saved]) -> Document:
    """Return one row for each name."""
    if not results:
        return Document("Nothing saved yet: `%%speedbench --save NAME` keeps a result")
    names: dict[str, list[Saved]] = {}
    for entry in results:
        names.setdefault(entry.name, []).append(entry)
    rows = []
    for name, entries in names.items():
        variants = ", ".join(map(_brief, entries[-1].result["variants"]))
        rows.append(Row((name, str(len(entries)), day(entries[-1].saved_at), variants)))
    table = Table(("name", "results", "newest", "what it found"), tuple(rows), ("results",))
    note = "`%speedkit history NAME` compares the newest with those before it."
    data = {"names": {name: len(entries) for name, entries in names.items()}}
    return Document(count(len(names), "saved name"), (Section(table), Section(note)), data)


def history_report(results: Sequence[Saved]) -> Document:
    """Return every result of one name, newest first, each variant against the newest result."""
    newest = results[-1]
    rows = [
        _row(entry, newest, variant, first=number == 0)
        for entry in reversed(results)
        for number, variant in enumerate(entry.result["variants"])
    ]
    columns = ("saved", "variant", "median", "speed-up", "the newest against it")
    lines = [_where(newest)]
    lines += [_where(entry) for entry in reversed(results) if _is_elsewhere(entry, newest)]
    data = [{"saved_at": entry.saved_at.isoformat(), **entry.result} for entry in results]
    sections = (
        Section(Table(columns, tuple(rows), columns[2:4])),
        Section("\n".join(dict.fromkeys(lines))),
    )
    headline = f"{newest.name}: {count(len(results), 'result')}"
    return Document(headline, sections, {"results": data})


def since(earlier: Saved, result: Mapping[str, Any]) -> list[str]:
    """Return how a new result compares with an earlier one, a line for each shared variant."""
    when = day(earlier.saved_at)
    if earlier.is_earlier:
        return [f"The result of {when} is {EARLIER}, so it is not compared."]
    shared = [(row, then) for row in result["variants"] if (then := _found(earlier, row["name"]))]
    return [
        f"{row['name']}: "
        f"{_words(ratio_between_runs(then['times_s'], row['times_s'], len(shared)), when)}"
        for row, then in shared
        if then["times_s"] and row["times_s"]
    ]


def _row(entry: Saved, newest: Saved, variant: Mapping[str, Any], first: bool) -> Row:
    times, now = variant["times_s"], _found(newest, variant["name"])
    when = f"{day(entry.saved_at)}{' (earlier version)' if entry.is_earlier else ''}"
    median = seconds(spread(times).median_s) if times else "–"
    against, tone = _against(entry, newest, times, now)
    cells = (when if first else "", variant["name"], median, _speedup(variant) or "–", against)
    return Row(cells, tone)


def _against(entry: Saved, newest: Saved, times: Any, now: Any) -> tuple[str, Tone]:
    """How the newest compares with the times of this entry."""
    if entry is newest:
        return "this is the newest", "plain"
    if entry.is_earlier != newest.is_earlier:
        return f"{EARLIER}, so not compared", "plain"
    if now is None or not now["times_s"] or not times:
        return "", "plain"
    factor = ratio_between_runs(times, now["times_s"], len(entry.result["variants"]))
    if _is_elsewhere(entry, newest):
        return f"{_words(factor)} (not the same machine or torch)", "plain"
    return _words(factor), "bad" if factor.low > 1 else "good" if factor.high < 1 else "plain"


def _words(factor: Ratio, when: str = "") -> str:
    """`slower than on 12 May: 1.08× [1.05, 1.11]`; the ratio is above 1 in both directions."""
    if math.isinf(factor.high):
        return f"too few rounds to tell{f' against {when}' if when else ''}"
    than = "" if not when else f" than {when}" if when.startswith("today") else f" than on {when}"
    if factor.low > 1:
        return f"slower{than}: {_interval(factor)}"
    if factor.high < 1:
        faster = Ratio(1 / factor.median, 1 / factor.high, 1 / factor.low, factor.pairs)
        return f"faster{than}: {_interval(faster)}"
    return f"not told apart{than.replace(' than', ' from')}: {_interval(factor)} the time"


def _interval(factor: Ratio) -> str:
    return f"{ratio(factor.median)} [{factor.low:.2f}, {factor.high:.2f}]"


def _found(entry: Saved, name: str) -> Mapping[str, Any] | None:
    return next((row for row in entry.result["variants"] if row["name"] == name), None)


def _speedup(row: Mapping[str, Any]) -> str:
    """With its interval; without one it is no number to go by. Empty for what is compared with."""
    speedup, low, high = (row.get(name) for name in ("speedup", "low", "high"))
    if speedup is None:
        return ""
    if not low or high is None:
        return "too few rounds"
    verdict = row.get("verdict")
    word = CHANGES if verdict == "other model" else verdict
    told = f" ({word})" if verdict in NOT_THE_SAME else ""
    return f"{ratio(speedup)} [{ratio(low)} to {ratio(high)}]{told}"


def _brief(row: Mapping[str, Any]) -> str:
    times = row["times_s"]
    known = _speedup(row) or (seconds(spread(times).median_s) if times else "")
    return f"{row['name']} {known}".rstrip()


def _where(entry: Saved) -> str:
    environment = entry.result.get("environment", {})  # another version has kept none
    return f"{day(entry.saved_at)}: {environment.get('device')}, torch {environment.get('torch')}"


def _is_elsewhere(entry: Saved, newest: Saved) -> bool:
    then, now = (one.result.get("environment", {}) for one in (entry, newest))
    return any(then.get(key) != now.get(key) for key in SAME_WHERE)
