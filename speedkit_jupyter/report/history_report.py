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
    """One row for each name."""
    if not results:
        return Document("Nothing saved yet: `%%speedbench --save NAME` keeps a result")
    names = list(dict.fromkeys(entry.name for entry in results))
    rows = []
    for name in names:
        of_name = [entry for entry in results if entry.name == name]
        newest = of_name[-1]
        variants = ", ".join(_brief(row) for row in newest.result["variants"])
        rows.append(Row((name, str(len(of_name)), day(newest.saved_at), variants)))
    table = Table(("name", "results", "newest", "what it found"), tuple(rows), ("results",))
    note = "`%speedkit history NAME` compares the newest with those before it."
    data = {"names": {name: sum(entry.name == name for entry in results) for name in names}}
    return Document(count(len(names), "saved name"), (Section(table), Section(note)), data)


def history_report(results: Sequence[Saved]) -> Document:
    """Every result of one name, newest first, each variant against the newest result."""
    newest = results[-1]
    rows = []
    for entry in reversed(results):
        for number, variant in enumerate(entry.result["variants"]):
            rows.append(_row(entry, newest, variant, first=number == 0))
    columns = ("saved", "variant", "median", "speed-up", "the newest against it")
    table = Table(columns, tuple(rows), columns[2:4])
    lines = [_where(newest)]
    lines += [line for entry in reversed(results[:-1]) if (line := _elsewhere(entry, newest))]
    data = {
        "results": [{"saved_at": entry.saved_at.isoformat(), **entry.result} for entry in results]
    }
    headline = f"{newest.name}: {count(len(results), 'result')}"
    return Document(headline, (Section(table), Section("\n".join(dict.fromkeys(lines)))), data)


def since(earlier: Saved, result: Mapping[str, Any]) -> list[str]:
    """How a new result compares with an earlier one, a line for each variant that both have."""
    if earlier.is_earlier:
        return [f"The result of {day(earlier.saved_at)} is {EARLIER}, so it is not compared."]
    lines = []
    shared = [row for row in result["variants"] if _found(earlier, row["name"]) is not None]
    for row in shared:
        then = _found(earlier, row["name"])
        if then is not None and then["times_s"] and row["times_s"]:
            factor = ratio_between_runs(then["times_s"], row["times_s"], len(shared))
            lines.append(f"{row['name']}: {_words(factor, day(earlier.saved_at))}")
    return lines


def _row(entry: Saved, newest: Saved, variant: Mapping[str, Any], first: bool) -> Row:
    against, tone = "", "plain"
    now = _found(newest, variant["name"])
    if entry is newest:
        against = "this is the newest"
    elif now is not None and now["times_s"] and variant["times_s"]:
        factor = ratio_between_runs(
            variant["times_s"], now["times_s"], len(entry.result["variants"])
        )
        against, tone = _words(factor), _tone(factor)
    if entry is not newest and entry.is_earlier != newest.is_earlier:
        against, tone = f"{EARLIER}, so not compared", "plain"
    elif entry is not newest and _elsewhere(entry, newest):
        against, tone = f"{against} (not the same machine or torch)", "plain"
    times = variant["times_s"]
    when = f"{day(entry.saved_at)}{' (earlier version)' if entry.is_earlier else ''}"
    return Row(
        (
            when if first else "",
            variant["name"],
            seconds(spread(times).median_s) if times else "–",
            _speedup(variant) or "–",
            against,
        ),
        tone,  # type: ignore[arg-type]
    )


def _words(factor: Ratio, when: str = "") -> str:
    """`slower than on 12 May: 1.08× [1.05, 1.11]`; the ratio is above 1 in both directions."""
    if math.isinf(factor.high):
        against = f" against {when}" if when else ""
        return f"too few rounds to tell{against}"
    than = "" if not when else f" than {when}" if when.startswith("today") else f" than on {when}"
    if factor.low > 1:
        return f"slower{than}: {_interval(factor)}"
    if factor.high < 1:
        faster = Ratio(1 / factor.median, 1 / factor.high, 1 / factor.low, factor.pairs)
        return f"faster{than}: {_interval(faster)}"
    return f"not told apart{than.replace(' than', ' from')}: {_interval(factor)} the time"


def _interval(factor: Ratio) -> str:
    return f"{ratio(factor.median)} [{factor.low:.2f}, {factor.high:.2f}]"


def _tone(factor: Ratio) -> Tone:
    return "bad" if factor.low > 1 else "good" if factor.high < 1 else "plain"


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
    if speedup := _speedup(row):
        return f"{row['name']} {speedup}"
    return f"{row['name']} {seconds(spread(times).median_s)}" if times else row["name"]


def _environment(entry: Saved) -> Mapping[str, Any]:
    """Empty where another version has kept none."""
    environment: Mapping[str, Any] = entry.result.get("environment", {})
    return environment


def _where(entry: Saved) -> str:
    environment = _environment(entry)
    return f"{day(entry.saved_at)}: {environment.get('device')}, torch {environment.get('torch')}"


def _elsewhere(entry: Saved, newest: Saved) -> str:
    """Where it was measured, if that is not where the newest was."""
    then, now = _environment(entry), _environment(newest)
    return _where(entry) if any(then.get(k) != now.get(k) for k in SAME_WHERE) else ""
