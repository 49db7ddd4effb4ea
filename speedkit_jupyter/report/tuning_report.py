"""Reports about tuning, saved results, learned plans and compiled code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from speedkit_jupyter.machines import compile_cache
from speedkit_jupyter.report.comparison_report import describe_gain
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import AS_BEFORE, BLANK, CodeBlock, Section, Table, banner
from speedkit_jupyter.rounds.statistics import BUSY, INTERVAL, spread
from speedkit_jupyter.search import learning
from speedkit_jupyter.search.objective import FAR_SLOWER, LEAST_SAVED
from speedkit_jupyter.search.outcome import Tuning
from speedkit_jupyter.support import database
from speedkit_jupyter.support.database import Kept
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.units import between, count, day, ratio, seconds, share, size

# Compiling that took less goes without saying.
LEAST_SAID_S = 0.5
PARTS = ("part", "adds", INTERVAL)
PLANS = ("plan", "speed-up", "verdict")
# Plans that the table shows; the others are folded.
MOST_SHOWN = 5
MEMORY = "Peak memory of a step: {} before, {} with the plan."


def tuning_report(tuning: Tuning) -> Document:
    """Return the answer with its proof, the gain of each part, and every plan that was tried."""
    peaks, checked = _peaks(tuning), ""
    parts = [(name, ratio(r.median), between(r.low, r.high)) for name, r in tuning.parts()]
    if tuning.learned is not None and tuning.confirmed:
        when = day(tuning.learned.saved_at)
        checked = f"Learned before ({when}) and checked again now; --fresh searches again."
    plans = _plans(tuning)
    content = [
        Table(PARTS, parts if tuning.helped else (), PARTS[1:]),
        MEMORY.format(*peaks) if peaks and tuning.helped else "",
        Table(PLANS, plans[:MOST_SHOWN], wraps=PLANS[:1]),
        Section(Table(PLANS, plans[MOST_SHOWN:], wraps=PLANS[:1]), folded=True, noun="plan"),
        f"Left as they are: {', '.join(tuning.kept)}." if tuning.kept else "",
        *tuning.notes,
        checked,
        AS_BEFORE,
        CodeBlock(_next_steps(tuning)) if tuning.helped or tuning.likely else None,
    ]
    return Document(_headline(tuning, peaks), content, tuning.to_dict())


def _plans(tuning: Tuning) -> list[tuple[str, str, str]]:
    """Return each plan with its speed-up and its verdict: the answer, then by their speed-ups."""
    likely = {tuning.likely: "likely, not proven"} if tuning.likely else {}
    answer = {tuning.winner.name: f"proven{tuning.where}"} if tuning.helped else likely
    verdicts = dict(tuning.rejected)
    speedups, ranks = {}, dict.fromkeys(answer, -math.inf)
    for row in tuning.known.rows():
        name, found = row.record.name, row.comparison.ratio(row.record)
        found = tuning.proven if row.record is tuning.record else found
        why = tuning.wanted.why_not(row.comparison, row.record, next(iter(answer), "another plan"))
        if found is not None:
            speedups[name] = BLANK if row.is_vague else str(found)
            ranks.setdefault(name, -found.median)
            # The reason may be of an earlier race, with a number that is not the last.
            verdicts[name] = why.replace(f": {found}", "")
        verdicts.setdefault(name, why)
    verdicts |= answer
    return [
        (name, speedups.get(name, BLANK), verdicts[name])
        for name in sorted(verdicts, key=lambda name: ranks.get(name, math.inf))
    ]


def _next_steps(tuning: Tuning) -> str:
    """Return magics to run next, with the models' names where there are several."""
    models, code = ",".join(tuning.named), [f"code {name}" for name in tuning.named or ("",)]
    lines = {
        f"apply {models}": "applies the plan; with -v NAME, NAME.apply() too",
        "verify": "compares loss curves with and without the plan",
    } | dict.fromkeys(code, "the plan as plain PyTorch, to take home")
    if not tuning.helped:
        lines = {f"apply --likely {models}": "applies the plan, although it is not proven"}
    width = max(map(len, map(str.strip, lines)))
    return "\n".join(f"%speedkit {one.strip():{width}}  # {about}" for one, about in lines.items())


def _headline(tuning: Tuning, peaks: tuple[str, str] | None) -> str:
    return f"{banner(tuning.busy)}{_answer(tuning, peaks)}"


def _answer(tuning: Tuning, peaks: tuple[str, str] | None) -> str:
    took = f"in {seconds(tuning.seconds)}" if tuning.seconds else "interrupted"
    if tuning.seconds and tuning.compiling_s >= LEAST_SAID_S:
        took += f", {seconds(tuning.compiling_s)} of them compiling"
    if not tuning.helped and tuning.unclear:
        answer = "Likely" if tuning.likely else "Could not tell"
        return f"{answer}: {tuning.unclear.removeprefix(f'{BUSY}; ')} ({took})"
    comparison, record = tuning.comparison, tuning.record
    anywhere, proven = tuning.ratio, tuning.proven
    if comparison is None or record is None or anywhere is None or proven is None:
        return f"Nothing to gain: {_nothing(tuning)} ({took})"
    gain = f"is {describe_gain(proven, comparison.baseline.name)}"
    if tuning.objective == "memory" and peaks:
        gain = f"needs {peaks[1]} in place of {peaks[0]} and {gain}"
    elif tuning.steps is not None:
        all_s = tuning.steps * spread(comparison.baseline.times_s).median_s
        with_plan_s = record.settling_s + all_s / proven.median
        total = f"{seconds(with_plan_s)} in place of {seconds(all_s)}"
        gain += f": {count(tuning.steps, 'step')} take {total}"
    if tuning.where:
        took = f"{between(anywhere.low, anywhere.high)} later or in another; {took}"
    return f"{tuning.winner.name} {gain}, confirmed in fresh rounds{tuning.where} ({took})"


def _nothing(tuning: Tuning) -> str:
    """Return the number behind the answer that no plan is worth it."""
    if tuning.objective == "memory":
        times = f"{tuning.within or FAR_SLOWER:g} times the time"
        return f"no plan saves {share(LEAST_SAVED)} of the peak memory in at most {times}"
    most = tuning.most
    return f"no plan is more than {ratio(most)} as fast" if most else "no plan could be timed here"


def _peaks(tuning: Tuning) -> tuple[str, str] | None:
    sides = (tuning.comparison.baseline if tuning.comparison else None, tuning.record)
    peaks = [side.memory.peak_bytes if side and side.memory else None for side in sides]
    return (size(peaks[0]), size(peaks[1])) if peaks[0] and peaks[1] else None


# --- the store ---

# Values that results of another version may lack.
UNKNOWN = {"device": None, "torch": None}
# Verdicts that are shown next to a speed-up.
TOLD = ("accepted", "other model", "wrong", "not checked")


def history_list(results: Sequence[Kept]) -> Document:
    if not results:
        return Document("Nothing saved yet: `%%speedbench --save NAME` keeps a result")
    names: dict[str, list[Kept]] = {}
    for entry in results:
        names.setdefault(entry.name, []).append(entry)
    rows = []
    for name, entries in names.items():
        variants = ", ".join(
            f"{row['name']} {_speedup(row) or _median(row)}".rstrip()
            for row in entries[-1].value["variants"]
        )
        rows.append((name, str(len(entries)), day(entries[-1].saved_at), variants))
    table = Table(("name", "results", "newest", "what it found"), rows, ("results",))
    note = "`%speedkit history NAME` shows all of one name."
    return Document(count(len(names), "saved name"), [table, note])


def history_report(results: Sequence[Kept]) -> Document:
    """Return every result of one name, newest first."""
    rows = [
        (
            f"{day(entry.saved_at)}{' (earlier version)' if entry.is_earlier else ''}"
            f"{' (busy machine)' if entry.value.get('busy') else ''}",
            variant["name"],
            _median(variant) or BLANK,
            _speedup(variant) or BLANK,
            "{device}, torch {torch}".format(**UNKNOWN | entry.value.get("environment", {})),
        )
        for entry in reversed(results)
        for variant in entry.value["variants"]
    ]
    columns = ("saved", "variant", "median", "speed-up", "where")
    table = Table(columns, rows, columns[2:4], wraps=columns[1:2])
    return Document(f"{results[-1].name}: {count(len(results), 'result')}", [table])


def _median(row: Mapping[str, Any]) -> str:
    return seconds(spread(row["times_s"]).median_s) if row["times_s"] else ""


def _speedup(row: Mapping[str, Any]) -> str:
    """Return a speed-up with its interval; empty for the baseline."""
    speedup, low, high = (row.get(name) for name in ("speedup", "low", "high"))
    if speedup is None or not low or high is None:
        return "" if speedup is None else "too few rounds"
    verdict = f" ({row['verdict']})" if row.get("verdict") in TOLD else ""
    return f"{ratio(speedup)} [{between(low, high)}]{verdict}"


def tuned_list(plans: Sequence[Kept]) -> Document:
    """Return the plans that tuning has learned, newest first."""
    if not plans:
        return Document("Nothing learned yet: `%%speedbench --tune` finds a plan and keeps it")
    columns = ("number", "plan", "speed-up", "model and machine", "inputs", "learned")
    note = "`%speedkit apply` uses the newest that fits; `%speedkit tuned forget NUMBER` drops one."
    table = Table(columns, [_learned(one) for one in reversed(plans)], columns[:1], columns[1:5])
    return Document(count(len(plans), "learned plan"), [table, note])


def _learned(entry: Kept) -> tuple[str, ...]:
    plan = entry.value
    gain = learning.gain(plan, " in its process")
    work = "training" if plan["trains"] else "inference"
    subject = f"{plan['model']}, {plan['parameters']:,} parameters, {work}; {plan['device']}"
    name = plan["name"] if plan["values"] else "leave it as it is"
    if not learning.is_usable(entry):
        name += f" (of {'an earlier' if entry.is_earlier else 'another'} version, not used)"
    inputs = ", ".join(plan["inputs"]) or "not seen"
    return str(entry.number), name, gain or BLANK, subject, inputs, day(entry.saved_at)


def cache_report() -> Document:
    """Return where compiled code is kept, and how much by machine; or why it is not used."""
    try:
        here = compile_cache.trusted()
        folders = compile_cache.machines()
    except SpeedKitError as error:
        return Document(f"Compiled code is not kept, and none is loaded: {error}")
    rows = []
    for folder in sorted(folders, key=lambda one: one != here):
        found = compile_cache.files(folder)
        used = [datetime.fromtimestamp(when, timezone.utc) for when, _, _ in found]
        machine = (
            "this machine, torch and compiler" if folder == here else f"another: {folder.name}"
        )
        bundles = len(list((folder / compile_cache.BUNDLES).glob("*")))
        total = size(sum(bytes_ for _, bytes_, _ in found))
        rows.append((machine, total, str(len(found)), str(bundles), day(max(used)) if used else ""))
    columns = ("of", "size", "files", "learned plans", "last used")
    limit = f"At most {size(compile_cache.MOST_BYTES)}: what was not used for longest goes."
    table = Table(columns, rows, columns[1:4])
    data = database.folder()
    is_there = here.is_relative_to(data.resolve())
    why = "" if is_there else f"torch's C++ build can't take a path such as {data}."
    lines = [table or "Nothing is kept yet.", limit, why]
    return Document(f"Compiled code in {here.parent}", lines)
