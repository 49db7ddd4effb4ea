"""Reports about data and memory: loaders, batch sizes, and what holds memory."""

from __future__ import annotations

from functools import partial

from speedkit_jupyter.batching.batch_sizes import KNEE, BatchSizes, Size
from speedkit_jupyter.batching.sweep import FAR
from speedkit_jupyter.freeing.freed import Freed, Held, Own
from speedkit_jupyter.loading.race import Candidate
from speedkit_jupyter.loading.tuner import LoaderTuning
from speedkit_jupyter.measure.results.statistics import INTERVAL
from speedkit_jupyter.report import plots
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Code, Picture, Row, Section, Table
from speedkit_jupyter.report.units import between, ratio, seconds, size
from speedkit_jupyter.support.words import count, share

COLUMNS = ("", "settings", "a batch", "waiting", "as fast as now", INTERVAL, "")
OF_LOADING = "loading alone"
TAKE = "The same in plain torch; `-v NAME` gives a variable the rebuilt loader"


def loader_report(tuning: LoaderTuning) -> Document:
    """Return the choice first, then all that was measured."""
    rows = tuple(_loader_row(tuning, one) for one in tuning.race.candidates)
    sections = [Section(Table(COLUMNS, rows, COLUMNS[2:6], wraps=("settings",)))]
    if tuning.remarks:
        sections.append(Section("\n".join(tuning.remarks)))
    if tuning.declined:
        declined = tuple(Row((name, why)) for name, why in tuning.declined.items())
        sections.append(Section(Table(("not tried", "why"), declined)))
    if tuning.is_changed:
        sections.append(Section(Code(tuning.source), TAKE))
    sections.append(Section(_note(tuning)))
    return Document(_loader_headline(tuning), tuple(sections), tuning.to_dict())


def _loader_headline(tuning: LoaderTuning) -> str:
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


def _loader_row(tuning: LoaderTuning, one: Candidate) -> Row:
    own, found = one is tuning.own, tuning.race.ratio(one)
    chosen = one is tuning.chosen
    note = one.failure or one.why_out or ("as it is" if own else "")
    cells = (
        "→" if chosen else "",
        one.words,
        seconds(one.batch_s) if one.times_s else "–",
        share(one.waiting) if one.times_s else "–",
        "" if own or found is None else ratio(found.median),
        "" if own or found is None else between(found.low, found.high),
        ", ".join(["taken", note] if chosen and note else ["taken"] if chosen else [note]),
    )
    return Row(cells, "bad" if one.failure else "good" if chosen and not own else "plain")


def _note(tuning: LoaderTuning) -> str:
    epoch = f"Epochs of {tuning.epoch:,} batches, their beginnings included. "
    return (
        f"{epoch}All that measuring did to model, optimizer and random state is undone; no worker "
        "is left."
    )


WARNING = (
    "Another batch size is another training: gradients are averaged over more samples, and the "
    "learning rate has to be found anew (often it grows with the size, or with its root). Nothing "
    "was changed."
)


def batch_report(found: BatchSizes) -> Document:
    """Return what to choose first, then each size."""
    if not found.measured:
        return Document("Nothing was measured")
    columns = ("batch", "a step", "samples a second", INTERVAL, "peak memory", "")
    rows = tuple(_batch_row(found, one) for one in found.sizes)
    sections = [
        Section(Table(columns, rows, columns[:-1])),
        Section(Picture(partial(_png, found), _batch_headline(found))),
        Section(_about_memory(found)),
        Section(WARNING),
    ]
    return Document(_batch_headline(found), tuple(sections), found.to_dict())


def _batch_headline(found: BatchSizes) -> str:
    knee, fastest = found.knee, found.fastest
    words = f"`{found.subject}`: batches of {fastest.number:,} are the fastest "
    words += f"({fastest.rate:,.0f} samples a second)"
    if len(found.measured) == 1:
        words = f"`{found.subject}`: no other batch size than {fastest.number:,} was measured"
    elif not found.is_proven:
        words = f"`{found.subject}`: too noisy to say which batch size is the fastest (--budget)"
    elif knee is not fastest:
        words += f"; {knee.number:,} give {share(knee.rate / fastest.rate)} of that"
    if found.largest is not None:
        most = max(one.number for one in found.measured)
        about = "at least" if found.largest in (most, FAR * most) else "about"
        words += f"; {about} {_rounded(found.largest):,} fit"
    return words


def _batch_row(found: BatchSizes, one: Size) -> Row:
    if not one.first_s:
        return Row((f"{one.number:,}", "–", "–", "–", "–", one.why_not), "quiet")
    is_knee, is_fastest = (found.is_proven and one is it for it in (found.knee, found.fastest))
    notes = ["as it is"] * (one.number == found.now) + ["fastest"] * is_fastest
    notes += [f"knee: the smallest with {share(KNEE)} of the fastest"] * is_knee
    interval = "–" if one.interval is None else "{:,.0f} to {:,.0f}".format(*one.interval)
    cells = (
        f"{one.number:,}",
        seconds(one.samples / one.rate),
        f"{one.rate:,.0f}",
        interval,
        "–" if one.peak_bytes is None else size(one.peak_bytes),
        ", ".join(notes),
    )
    return Row(cells, "good" if is_knee else "plain")


def _about_memory(found: BatchSizes) -> str:
    words = f"Batches: {found.source}, repeated where there are too few; loading is not timed."
    if found.available_bytes is not None and found.largest is not None:
        words += (
            f" {size(found.available_bytes)} may be used; the largest is by the growth of memory, "
            "a tenth of it kept free, or by what was tried."
        )
    return words


def _rounded(number: int) -> int:
    """To two digits, downwards: it is an estimate where it was not tried."""
    digits = max(len(str(number)) - 2, 0)
    return number // int(10**digits) * int(10**digits)


def _png(found: BatchSizes) -> bytes:
    return plots.as_png(plots.batch_sizes(found))


def free_report(freed: Freed) -> Document:
    """Return what held memory, and who holds what is left."""
    sections = []
    if freed.let_go:
        rows = tuple(map(_held, freed.let_go))
        columns = ("held by", "held", "the largest of it", "gone with it")
        sections.append(Section(Table(columns, rows, columns[1:2], wraps=("the largest of it",))))
    if freed.kept:
        rows = tuple(map(_own, freed.kept))
        columns = ("name", "holds", "the largest of it", "remark")
        table = Table(columns, rows, columns[1:2], wraps=("the largest of it",))
        sections.append(Section(table, "Your own names, which were not touched"))
    sections.append(Section("\n".join(_lines(freed))))
    return Document(_free_headline(freed), tuple(sections), freed.to_dict())


def _free_headline(freed: Freed) -> str:
    if not freed.let_go:
        return "Nothing to let go of: only your own names hold tensors"
    before_bytes, after_bytes = freed.process_bytes
    given = max(sum(one.bytes for one in freed.let_go), before_bytes - after_bytes)
    device = "".join(
        f"; on {name} {size(before)} became {size(after)}"
        for name, (before, after) in freed.devices_bytes.items()
    )
    return f"Let go of {size(given)}{device}"


def _held(one: Held) -> Row:
    number = f", {count(one.number, 'value')}" if one.number else ""
    return Row((one.holder, size(one.bytes), f"{one.what}{number}", one.loses or "–"))


def _own(one: Own) -> Row:
    graphs = "–"
    if one.graphs:
        graphs = f"{count(one.graphs, 'tensor')} with a graph: .detach() lets go of what it keeps"
    return Row((one.name, size(one.bytes), one.what, graphs))


def _lines(freed: Freed) -> list[str]:
    before, after = freed.process_bytes
    lines = [f"This process: {size(before)} of main memory before, {size(after)} now."]
    if freed.let_go:
        lines.append(
            "The table counts tensors and arrays that Python knows of; what graphs kept beside "
            "them is gone too."
        )
    return lines
