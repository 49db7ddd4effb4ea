"""Reports about tuning, saved results, learned plans and compiled code."""

from __future__ import annotations

import math
from collections.abc import Sequence

from speedkit_jupyter.machines import compile_cache
from speedkit_jupyter.report.comparison_report import describe_gain
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import AS_BEFORE, BLANK, CodeBlock, Section, Table, banner
from speedkit_jupyter.rounds.presentable import report_of
from speedkit_jupyter.rounds.statistics import INTERVAL, spread
from speedkit_jupyter.search import learning
from speedkit_jupyter.search.objective import why_not
from speedkit_jupyter.search.outcome import Tuning
from speedkit_jupyter.support import database
from speedkit_jupyter.support.database import Kept
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.units import between, count, day, ratio, seconds, size

PARTS = ("part", "adds", INTERVAL)
PLANS = ("plan", "speed-up", "verdict")
# Plans that the table shows; the others are folded.
MOST_SHOWN = 5


@report_of.register
def tuning_report(tuning: Tuning) -> Document:
    """Return the answer with its proof, the gain of each part, and every plan that was tried."""
    parts = [(name, ratio(r.median), between(r.low, r.high)) for name, r in tuning.parts()]
    plans = _plans(tuning)
    content = [
        Table(PARTS, parts if tuning.helped else (), PARTS[1:]),
        Table(PLANS, plans[:MOST_SHOWN], wraps=PLANS[:1]),
        Section(Table(PLANS, plans[MOST_SHOWN:], wraps=PLANS[:1]), folded=True, noun="plan"),
        f"Left as they are: {', '.join(tuning.kept)}." if tuning.kept else "",
        *tuning.notes,
        AS_BEFORE,
        CodeBlock(_next_steps(tuning)) if tuning.helped or tuning.likely else None,
    ]
    return Document(f"{banner(tuning.busy)}{_answer(tuning)}", content, tuning.to_dict())


def _plans(tuning: Tuning) -> list[tuple[str, str, str]]:
    """Return each plan with its speed-up and its verdict: the answer, then by their speed-ups."""
    likely = {tuning.likely: "likely, not proven"} if tuning.likely else {}
    answer = {tuning.winner.name: f"proven{tuning.where}"} if tuning.helped else likely
    verdicts = dict(tuning.rejected)
    speedups, ranks = {}, dict.fromkeys(answer, -math.inf)
    for row in tuning.known.rows():
        name, found = row.record.name, row.comparison.ratio(row.record)
        found = tuning.ratio if row.record is tuning.record else found
        why = why_not(row.comparison, row.record, next(iter(answer), "another plan"))
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


def _answer(tuning: Tuning) -> str:
    took = f"in {seconds(tuning.seconds)}" if tuning.seconds else "interrupted"
    if tuning.seconds and tuning.compiling_s >= 0.5:  # less goes without saying
        took += f", {seconds(tuning.compiling_s)} of them compiling"
    if not tuning.helped and tuning.unclear:
        return f"{'Likely' if tuning.likely else 'Could not tell'}: {tuning.unclear} ({took})"
    if (proven := tuning.ratio) is None:
        most = tuning.most
        nothing = f"no plan is more than {ratio(most)} as fast" if most else "no plan was timed"
        return f"Nothing to gain: {nothing} ({took})"
    gain = f"is {describe_gain(proven, 'baseline')}"
    return f"{tuning.winner.name} {gain}, confirmed in fresh rounds{tuning.where} ({took})"


# --- the store ---

# Verdicts that are shown next to a speed-up.
TOLD = ("accepted", "other model", "wrong", "not checked")
HISTORY = ("saved", "variant", "median", "speed-up", "where")
LEARNED = ("number", "plan", "speed-up", "model and machine", "inputs", "learned")


def history_list(results: Sequence[Kept]) -> Document:
    if not results:
        return Document("Nothing saved yet: `%%speedbench --save NAME` keeps a result")
    newest = {entry.name: day(entry.saved_at) for entry in results}
    names = [entry.name for entry in results]
    rows = [(name, str(names.count(name)), when) for name, when in newest.items()]
    table = Table(("name", "results", "newest"), rows, ("results",))
    note = "`%speedkit history NAME` shows all of one name."
    return Document(count(len(rows), "saved name"), [table, note])


def history_report(results: Sequence[Kept]) -> Document:
    """Return every result of one name, newest first."""
    rows = [
        (
            f"{day(entry.saved_at)}{' (earlier version)' if entry.is_earlier else ''}"
            f"{' (busy machine)' if entry.value.get('busy') else ''}",
            variant["name"],
            seconds(spread(variant["times_s"]).median_s) if variant["times_s"] else BLANK,
            (learning.gain(variant) or BLANK)
            + (f", {variant['verdict']}" if variant.get("verdict") in TOLD else ""),
            f"{where.get('device')}, torch {where.get('torch')}",
        )
        for entry, where in [(one, one.value.get("environment", {})) for one in reversed(results)]
        for variant in entry.value["variants"]
    ]
    table = Table(HISTORY, rows, HISTORY[2:4], wraps=HISTORY[1:2])
    return Document(f"{results[-1].name}: {count(len(results), 'result')}", [table])


def tuned_list(plans: Sequence[Kept]) -> Document:
    if not plans:
        return Document("Nothing learned yet: `%%speedbench --tune` finds a plan and keeps it")
    note = "`%speedkit apply` uses the newest that fits; `%speedkit tuned forget NUMBER` drops one."
    table = Table(LEARNED, [_learned(one) for one in reversed(plans)], LEARNED[:1], LEARNED[1:5])
    return Document(count(len(plans), "learned plan"), [table, note])


def _learned(entry: Kept) -> tuple[str, ...]:
    plan = entry.value
    gain = learning.gain(plan)
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
        here, folders = compile_cache.trusted(), compile_cache.machines()
    except SpeedKitError as error:
        return Document(f"Compiled code is not kept, and none is loaded: {error}")
    rows = []
    for folder in sorted(folders, key=lambda one: one != here):
        name = "this machine, torch and compiler" if folder == here else f"another: {folder.name}"
        rows.append((name, size(compile_cache.size_bytes(folder))))
    limit = f"More than {size(compile_cache.MOST_BYTES)} are deleted."
    table = Table(("of", "size"), rows, ("size",))
    data = database.folder()
    is_there = here.is_relative_to(data.resolve())
    why = "" if is_there else f"torch's C++ build can't take a path such as {data}."
    lines = [table or "Nothing is kept yet.", limit, why]
    return Document(f"Compiled code in {here.parent}", lines)
