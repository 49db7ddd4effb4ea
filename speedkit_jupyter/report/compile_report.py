"""What torch.compile did in a session, what is said after a cell, and max-autotune's searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from speedkit_jupyter.extras.autotune.tuner import Counted, Model, Tuner
from speedkit_jupyter.plans.compile_history import Compiled, Finding, History, grouped
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import BLANK, Row, Section, Table
from speedkit_jupyter.rounds.sampler import Progress
from speedkit_jupyter.support.source_lines import Spot, cells, source
from speedkit_jupyter.support.units import count, seconds, share

NOTHING = "torch.compile has compiled nothing in this session"
FINDINGS = ("what", "where", "why", "what to change")
COMPILED = ("compiled", "where", "times", "recompiles", "seconds", "cache hits")
KINDS = ("graph break", "recompile", "fall-back")
MORE = "`%speedkit compile` shows all that was compiled."


def notice(findings: Sequence[Finding]) -> Document:
    """Return what is wrong with what a cell has compiled, with its line and the remedy."""
    return Document(f"torch.compile: {_totals(findings)}", [_findings(findings, cells()), MORE])


def compiled_line(subject: str, took_s: float) -> Document:
    """Return what stands in the place of the live line once a cell has ended."""
    return Document(f"Compiled {subject} in {seconds(took_s)}")


def compiling_progress(so_far_s: float, expected_s: float | None) -> Progress:
    """Return how far compiling is, by how long it took the last time if that is known."""
    last = f"; the last time it took {seconds(expected_s)}" if expected_s else ""
    return Progress(so_far_s / expected_s if expected_s else 0.0, f"{so_far_s:.0f} s so far{last}")


def history_report(history: History) -> Document:
    """Return all that was compiled in the session, and all that was found."""
    every, found = history.compiled, history.findings
    if not (every or found):
        return Document(NOTHING)
    graphs = sum(one.has_graph for one in every)
    frames = sum(bool(one.function) for one in every)
    total = seconds(sum(one.seconds for one in every))
    hits = sum(one.hits for one in every)
    words = [count(frames, "frame"), count(graphs, "graph"), total, count(hits, "cache hit")]
    headline = f"torch.compile in this session: {', '.join(words)}; {_totals(found)}"
    names = cells()
    remedies = Section(_findings(found, names), "What to change")
    return Document(headline, [_compiled(every, names), remedies])


def _totals(findings: Sequence[Finding]) -> str:
    kinds = [one.kind for one in findings]
    others = sorted({*kinds} - {*KINDS})
    told = [count(kinds.count(kind), kind) for kind in KINDS if kind in kinds]
    told += [f"{kinds.count(kind)} {kind}" for kind in others]
    return ", ".join(told) or "no graph breaks, recompiles or fall-backs to act on"


def _findings(findings: Sequence[Finding], names: Mapping[str, str]) -> Table:
    rows = [
        Row((f"{number} × {one.kind}" if number > 1 else one.kind, _place(one.spot, names),
             one.what, one.remedy or BLANK), "bad" if one.kind == "fall-back" else "plain")
        for one, number in grouped(findings)
    ]  # fmt: skip
    return Table(FINDINGS, rows, wraps=FINDINGS[1:3], least_last=30)


def _compiled(every: Sequence[Compiled], names: Mapping[str, str]) -> Table:
    """Return a row for each function; backward passes that were compiled later have one row."""
    groups: dict[tuple[str, Spot | None], list[Compiled]] = {}
    for one in every:
        groups.setdefault((one.function, one.spot if one.function else None), []).append(one)
    rows = [
        (
            function or "backward passes",
            _place(spot, names),
            str(len(same)),
            str(sum(one.is_recompile for one in same)),
            seconds(sum(one.seconds for one in same)),
            str(sum(one.hits for one in same)),
        )
        for (function, spot), same in groups.items()
    ]
    return Table(COMPILED, rows, COMPILED[2:], wraps=COMPILED[:2])


def _place(spot: Spot | None, names: Mapping[str, str]) -> str:
    """Return `cell 3, line 2: y = model(x)`."""
    if spot is None:
        return BLANK
    file = names.get(spot.file) or spot.file.rpartition("/")[2]
    return f"{file}, line {spot.number}: `{source(*spot)}`"


# --- max-autotune's searches for kernels ---

SEARCHES = ("model", "of", "searches", "a search", "fastest first", "in first 3", "confident up to")
RECORD = "`%speedkit autotune record`, then "
NONE = "Nothing is recorded yet: {}compile with mode='max-autotune'"
MEANING = (
    "“Fastest first” and “in first 3”: the share of shapes, held back from training, for which the "
    "first kernels of the ranking hold one within 2 % of the fastest."
)


def autotune_report(
    tuner: Tuner | None, models: Sequence[Model], detected: str, chosen: str | None = None
) -> Document:
    """Return what is in force of autotune, what it did, and what is recorded."""
    lines = [counted_line(tuner.counted)] if tuner and tuner.counted != Counted() else []
    if chosen:
        lines.append(f"Predictions are by {chosen} in the place of {detected}.")
    rows = [_row(model, detected) for model in models]
    table = Table(SEARCHES, rows, SEARCHES[2:], wraps=SEARCHES[:2])
    body = [table, MEANING] if rows else [NONE.format("" if tuner else RECORD)]
    return Document(_headline(tuner), [*lines, *body])


def counted_line(counted: Counted) -> str:
    """Return what happened to searches so far, in one line."""
    words = [
        f"{counted.searched} recorded ({seconds(counted.searched_s)})",
        f"{counted.replayed} replayed",
        f"{counted.predictions} predicted",
    ]
    if counted.mean_confidence is not None:
        words[-1] += f" with a mean confidence of {share(counted.mean_confidence)}"
    words += [f"{counted.fallbacks} not predicted"] if counted.fallbacks else []
    words += [f"{counted.stale} out of date"] if counted.stale else []
    return f"{', '.join(words)}; about {seconds(counted.seconds_saved)} saved."


def _headline(tuner: Tuner | None) -> str:
    if tuner is None:
        return "Searches of max-autotune are neither recorded nor replayed"
    if tuner.problem:
        return f"autotune is {tuner.problem}"
    if not tuner.options.predicts:
        return "Searches of max-autotune are recorded, and replayed where they were before"
    return f"Kernels are predicted from a confidence of {share(tuner.options.confidence)} on"


def _row(model: Model, detected: str) -> tuple[str, ...]:
    found = model.calibration
    known = [share(one) for one in (found.top[0], found.top[-1], found.right[-1])] if found else []
    return (
        f"{model.name} (this device)" if model.name == detected else model.name,
        model.versions,
        str(len(model.searches)),
        seconds(model.median_s),
        *(known or [BLANK] * 3),
    )
