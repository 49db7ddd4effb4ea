"""Reports about what is kept on disk: saved results and learned plans."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from speedkit_jupyter.measure.results.statistics import Ratio, ratio_between_runs, spread
from speedkit_jupyter.report.comparison_report import CHANGES
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import BLANK, Row, Table, Tone
from speedkit_jupyter.report.units import between, day, ratio, seconds
from speedkit_jupyter.support.database import Learned, Saved
from speedkit_jupyter.support.words import count

# Verdicts that are told beside a speed-up.
TOLD = {
    "accepted": "accepted", "other model": CHANGES, "wrong": "wrong", "not checked": "not checked"
}  # fmt: skip
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
        variants = ", ".join(
            f"{row['name']} {_speedup(row) or _median(row)}".rstrip()
            for row in entries[-1].result["variants"]
        )
        rows.append((name, str(len(entries)), day(entries[-1].saved_at), variants))
    table = Table(("name", "results", "newest", "what it found"), rows, ("results",))
    note = "`%speedkit history NAME` compares the newest with those before it."
    return Document(count(len(names), "saved name"), [table, note])


def history_report(results: Sequence[Saved]) -> Document:
    """Return every result of one name, newest first, each variant against the newest result."""
    newest = results[-1]
    rows = [
        _row(entry, newest, variant, first=number == 0)
        for entry in reversed(results)
        for number, variant in enumerate(entry.result["variants"])
    ]
    columns = ("saved", "variant", "median", "speed-up", "the newest against it")
    lines = [
        f"{day(entry.saved_at)}: {', torch '.join(map(str, _where(entry)))}"
        for entry in reversed(results)
        if entry is newest or _where(entry) != _where(newest)
    ]
    content = [Table(columns, rows, columns[2:4]), "\n".join(dict.fromkeys(lines))]
    return Document(f"{newest.name}: {count(len(results), 'result')}", content)


def _row(entry: Saved, newest: Saved, variant: Mapping[str, Any], first: bool) -> Row:
    when = f"{day(entry.saved_at)}{' (earlier version)' if entry.is_earlier else ''}"
    against, tone = _against(entry, newest, variant)
    speedup, median = _speedup(variant) or BLANK, _median(variant) or BLANK
    return Row((when if first else "", variant["name"], median, speedup, against), tone)


def _against(entry: Saved, newest: Saved, variant: Mapping[str, Any]) -> tuple[str, Tone]:
    """How the newest compares with this one."""
    times, now = variant["times_s"], _found(newest, variant["name"])
    if entry is newest:
        return "this is the newest", "plain"
    if entry.is_earlier != newest.is_earlier:
        return f"{EARLIER}, so not compared", "plain"
    if now is None or not now["times_s"] or not times:
        return "", "plain"
    factor = ratio_between_runs(times, now["times_s"], len(entry.result["variants"]))
    if _where(entry) != _where(newest):
        return f"{_compared(factor)} (not the same machine or torch)", "plain"
    return _compared(factor), "bad" if factor.low > 1 else "good" if factor.high < 1 else "plain"


def _compared(factor: Ratio) -> str:
    """`slower: 1.08× [1.05, 1.11]`; the ratio is above 1 in both directions."""
    low, median, high = factor.low, factor.median, factor.high
    if math.isinf(high):
        return "too few rounds to tell"
    verdict = "slower" if low > 1 else "not told apart"
    if high < 1:
        verdict, low, median, high = "faster", 1 / high, 1 / median, 1 / low
    return f"{verdict}: {ratio(median)} [{low:.2f}, {high:.2f}]"


def _found(entry: Saved, name: str) -> Mapping[str, Any] | None:
    return next((row for row in entry.result["variants"] if row["name"] == name), None)


def _median(row: Mapping[str, Any]) -> str:
    return seconds(spread(row["times_s"]).median_s) if row["times_s"] else ""


def _speedup(row: Mapping[str, Any]) -> str:
    """With its interval; empty for what is compared with."""
    speedup, low, high = (row.get(name) for name in ("speedup", "low", "high"))
    if speedup is None:
        return ""
    if not low or high is None:
        return "too few rounds"
    verdict = row.get("verdict")
    return f"{ratio(speedup)} [{between(low, high)}]" + (
        f" ({TOLD[verdict]})" if verdict in TOLD else ""
    )


def _where(entry: Saved) -> tuple[Any, Any]:
    environment = entry.result.get("environment", {})  # another version has kept none
    return environment.get("device"), environment.get("torch")


def tuned_list(plans: Sequence[Learned]) -> Document:
    """Return the plans that tuning has learned, newest first."""
    if not plans:
        return Document("Nothing learned yet: `%%speedbench --tune` finds a plan and keeps it")
    columns = ("number", "plan", "speed-up", "model and machine", "inputs", "learned")
    note = "`%speedkit apply` uses the newest that fits; `%speedkit tuned forget NUMBER` drops one."
    if any(entry.is_earlier for entry in plans):
        note += " What an earlier version found is not used."
    table = Table(columns, [_learned(one) for one in reversed(plans)], columns[:1], columns[1:5])
    return Document(count(len(plans), "learned plan"), [table, note])


def _learned(entry: Learned) -> tuple[str, ...]:
    plan = entry.plan
    gain = BLANK if plan["speedup"] is None else ratio(plan["speedup"])
    if plan["low"] and plan["high"] is not None:
        gain += f" ({between(plan['low'], plan['high'])})"
    work = "training" if plan["trains"] else "inference"
    subject = f"{plan['model']}, {plan['parameters']:,} parameters, {work}; {plan['device']}"
    name = plan["name"] if plan["values"] else "leave it as it is"
    name += " (of an earlier version, not used)" if entry.is_earlier else ""
    inputs = ", ".join(plan["inputs"]) or "not seen"
    return str(entry.number), name, gain, subject, inputs, day(entry.learned_at)
