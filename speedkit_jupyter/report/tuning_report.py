"""Reports about tuning: the winner, what each part adds, what was rejected and why."""

from __future__ import annotations

from collections.abc import Sequence

from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.results.statistics import INTERVAL, spread
from speedkit_jupyter.report.comparison_report import describe_verdict
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Code, Row, Section, Table
from speedkit_jupyter.report.plan_report import TITLE, attention_table
from speedkit_jupyter.report.score_words import judged
from speedkit_jupyter.report.units import between, day, ratio, seconds, size
from speedkit_jupyter.support.database import Learned
from speedkit_jupyter.support.words import count
from speedkit_jupyter.tuning.outcome import Tuning

# Compiling that took less goes without saying.
LEAST_SAID_S = 0.5
# With the names of the models, where there are several to choose from.
NEXT = (
    ("apply {every}", "puts it into force; with -v NAME, NAME.apply() too"),
    ("verify", "compares loss curves with and without it"),
    ("code {first}", "the same as plain PyTorch, to take home"),
)


def tuning_report(tuning: Tuning) -> Document:
    """Return what to do, what it was proven to bring, and everything that was tried."""
    sections = []
    if tuning.record is not None and tuning.record.score is not None:
        sections.append(Section(f"{judged(tuning.record.score)}."))
    if tuning.helped:
        sections += _proof(tuning)
    if tuning.rejected:
        rows = tuple(Row((candidate.name, candidate.reason)) for candidate in tuning.rejected)
        sections.append(Section(Table(("tried", "why it is not in the plan"), rows)))
    if tuning.kept:
        sections.append(Section(f"Left as they are, as asked: {', '.join(tuning.kept)}."))
    sections += [Section(note) for note in tuning.notes]
    if tuning.learned is not None and tuning.confirmed:
        when = day(tuning.learned.learned_at)
        sections.append(
            Section(f"Learned before ({when}) and checked again now; --fresh searches anew.")
        )
    if tuning.facts.attention:
        sections.append(Section(attention_table(tuning.facts.attention), TITLE))
    undone = "All that measuring did to model, optimizer and random state is undone."
    sections.append(Section(undone))
    if tuning.helped:
        models = list(tuning.models)
        in_force = bool(models) and all(map(tuning.found.is_in_force, models))  # --apply
        sections.append(Section(Code(_next_steps(tuning.named, in_force))))
    return Document(_headline(tuning), tuple(sections), tuning.to_dict())


def _next_steps(named: Sequence[str], in_force: bool) -> str:
    """Lines that work as they stand."""
    words = {"every": ",".join(named), "first": "".join(named[:1])}
    lines = [(line.format(**words).strip(), about) for line, about in NEXT[in_force:]]
    width = max(len(line) for line, _ in lines)
    return "\n".join(f"%speedkit {line:{width}}  # {about}" for line, about in lines)


def tuned_list(plans: Sequence[Learned]) -> Document:
    """Return the plans that were learned, newest first."""
    if not plans:
        return Document("Nothing learned yet: `%%speedbench --tune` finds a plan and keeps it")
    columns = ("number", "plan", "speed-up", "model and machine", "inputs", "learned")
    rows = tuple(_learned(entry) for entry in reversed(plans))
    note = "`%speedkit apply` uses the newest that fits; `%speedkit tuned forget NUMBER` drops one."
    if any(entry.is_earlier for entry in plans):
        note += " What an earlier version found is not used."
    data = {
        "plans": [
            {"number": entry.number, "learned_at": entry.learned_at.isoformat(), **entry.plan}
            for entry in plans
        ]
    }
    headline = count(len(plans), "learned plan")
    return Document(
        headline,
        (Section(Table(columns, rows, columns[:1], wraps=columns[1:5])), Section(note)),
        data,
    )


def _learned(entry: Learned) -> Row:
    plan = entry.plan
    gain = "–" if plan["speedup"] is None else ratio(plan["speedup"])
    known = plan["low"] and plan["high"] is not None
    interval = f"{gain} ({between(plan['low'], plan['high'])})" if known else gain
    work = "training" if plan["trains"] else "inference"
    subject = f"{plan['model']}, {plan['parameters']:,} parameters, {work}; {plan['device']}"
    inputs = ", ".join(plan["inputs"]) or "not seen"
    name = plan["name"] if plan["values"] else "leave it as it is"
    if entry.is_earlier:
        name = f"{name} (of an earlier version, not used)"
    return Row((str(entry.number), name, interval, subject, inputs, day(entry.learned_at)))


def _headline(tuning: Tuning) -> str:
    took = f"in {seconds(tuning.seconds)}" if tuning.seconds else "interrupted"
    if tuning.seconds and tuning.compiling_s >= LEAST_SAID_S:
        took += f", {seconds(tuning.compiling_s)} of them compiling"
    if not tuning.helped and tuning.unclear:
        return f"Could not tell: {tuning.unclear} ({took})"
    if not tuning.helped or tuning.comparison is None or tuning.record is None:
        return f"Leave it as it is: nothing was proven better here ({took})"
    outcome = f"{tuning.winner.name} {_gain(tuning, tuning.comparison, tuning.record)}"
    if tuning.confirmed:
        return f"{outcome}, confirmed in fresh rounds ({took})"
    return f"Best so far: {outcome}; interrupted before it was confirmed"


def _gain(tuning: Tuning, comparison: Comparison, record: Record) -> str:
    """What was aimed at, and what it brings."""
    speed = f"is {describe_verdict(comparison, record)}"
    before, now = comparison.baseline.memory, record.memory
    if tuning.objective == "memory" and before and now and before.peak_bytes and now.peak_bytes:
        return f"needs {size(now.peak_bytes)} in place of {size(before.peak_bytes)} and {speed}"
    if tuning.steps is None or tuning.ratio is None:
        return speed
    all_s = tuning.steps * spread(comparison.baseline.times_s).median_s
    with_plan_s = record.settling_s + all_s / tuning.ratio.median
    total = f"{seconds(with_plan_s)} in place of {seconds(all_s)}"
    return f"{speed}: {count(tuning.steps, 'step')} take {total}"


def _proof(tuning: Tuning) -> list[Section]:
    """What each part is worth, in numbers, and what it does to memory."""
    parts, comparison, record = tuning.parts(), tuning.comparison, tuning.record
    rows = [Row((name, f"{ratio(r.median)}", between(r.low, r.high))) for name, r in parts]
    sections = []
    if rows:
        columns = ("part", "the plan with it over the plan without it", INTERVAL)
        sections.append(Section(Table(columns, tuple(rows), columns[1:])))
    if comparison is not None and record is not None:
        before, after = comparison.baseline.memory, record.memory
        if before and after and before.peak_bytes and after.peak_bytes:
            memory = f"{size(before.peak_bytes)} before, {size(after.peak_bytes)} with the plan"
            sections.append(Section(f"Peak memory of a step: {memory}."))
    return sections
