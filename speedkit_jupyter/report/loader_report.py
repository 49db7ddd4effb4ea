"""The report of a loader that was tuned: what was taken, what else was tried, and what was not."""

from __future__ import annotations

from speedkit_jupyter.loading.candidate import Candidate
from speedkit_jupyter.loading.loader_tuning import LoaderTuning
from speedkit_jupyter.measure.results.statistics import INTERVAL
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Code, Row, Section, Table
from speedkit_jupyter.report.units import between, ratio, seconds
from speedkit_jupyter.support.words import share

COLUMNS = ("", "settings", "a batch", "waiting", "as fast as now", INTERVAL, "")
OF_LOADING = "loading alone"
TAKE = "The same in plain torch; `-v NAME` gives a variable the rebuilt loader"


def loader_report(tuning: LoaderTuning) -> Document:
    """The choice first, then all that was measured."""
    rows = tuple(_row(tuning, one) for one in tuning.race.candidates)
    sections = [Section(Table(COLUMNS, rows, COLUMNS[2:6], wraps=("settings",)))]
    if tuning.remarks:
        sections.append(Section("\n".join(tuning.remarks)))
    if tuning.declined:
        declined = tuple(Row((name, why)) for name, why in tuning.declined.items())
        sections.append(Section(Table(("not tried", "why"), declined)))
    if tuning.is_changed:
        sections.append(Section(Code(tuning.source), TAKE))
    sections.append(Section(_note(tuning)))
    return Document(_headline(tuning), tuple(sections), tuning.to_dict())


def _headline(tuning: LoaderTuning) -> str:
    step = f"with `{tuning.against}`" if tuning.against else OF_LOADING
    found, own = tuning.ratio, tuning.own
    if found is None:
        waits = f" ({share(own.waiting)} of its time is waiting)" if tuning.against else ""
        said = f"Leave `{tuning.name}` as it is: nothing was proven faster {step}"
        return f"{said}{waits}" if own.times_s else said
    words = tuning.chosen.settings.words
    return (
        f"`{tuning.name}`, {words}: {ratio(found.median)} as fast {step}, "
        f"{INTERVAL} {ratio(found.low)} to {ratio(found.high)}"
    )


def _row(tuning: LoaderTuning, one: Candidate) -> Row:
    own, found = one is tuning.own, tuning.race.ratio(one)
    chosen = one is tuning.chosen
    note = one.failure or one.why_out or ("as it is" if own else "")
    cells = (
        "→" if chosen else "",
        one.words,
        seconds(one.batch_s(tuning.race.epoch)) if one.times_s else "–",
        share(one.waiting) if one.times_s else "–",
        "" if own or found is None else ratio(found.median),
        "" if own or found is None else between(found.low, found.high),
        ", ".join(["taken", note] if chosen and note else ["taken"] if chosen else [note]),
    )
    return Row(cells, "bad" if one.failure else "good" if chosen and not own else "plain")


def _note(tuning: LoaderTuning) -> str:
    epoch = f"Epochs of {tuning.race.epoch:,} batches, their beginnings included. "
    return (
        f"{epoch}All that measuring did to model, optimizer and random state is undone; no worker "
        "is left."
    )
