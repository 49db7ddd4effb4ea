"""Reports about what is kept on disk: saved results and learned plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from speedkit_jupyter.measure.results.statistics import spread
from speedkit_jupyter.report.comparison_report import CHANGES
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import BLANK, Table
from speedkit_jupyter.report.units import between, day, ratio, seconds
from speedkit_jupyter.support.database import Learned, Saved
from speedkit_jupyter.support.words import count

# Verdicts that are told beside a speed-up.
TOLD = {
    "accepted": "accepted", "other model": CHANGES, "wrong": "wrong", "not checked": "not checked"
}  # fmt: skip


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
    note = "`%speedkit history NAME` shows all of one name."
    return Document(count(len(names), "saved name"), [table, note])


def history_report(results: Sequence[Saved]) -> Document:
    """Return every result of one name, newest first."""
    rows = [
        (
            f"{day(entry.saved_at)}{' (earlier version)' if entry.is_earlier else ''}",
            variant["name"],
            _median(variant) or BLANK,
            _speedup(variant) or BLANK,
            _where(entry),
        )
        for entry in reversed(results)
        for variant in entry.result["variants"]
    ]
    columns = ("saved", "variant", "median", "speed-up", "where")
    table = Table(columns, rows, columns[2:4], wraps=columns[1:2])
    return Document(f"{results[-1].name}: {count(len(results), 'result')}", [table])


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


def _where(entry: Saved) -> str:
    environment = entry.result.get("environment", {})  # another version has kept none
    return f"{environment.get('device')}, torch {environment.get('torch')}"


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
