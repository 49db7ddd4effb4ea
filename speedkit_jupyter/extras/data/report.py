"""Reports about loaders, batch sizes, and what holds memory."""

from __future__ import annotations

from speedkit_jupyter.extras.data.batch_sizes import KNEE, BatchSizes, Size
from speedkit_jupyter.extras.data.batch_sweep import FAR
from speedkit_jupyter.extras.data.free import Freed
from speedkit_jupyter.extras.data.loader_race import LoaderCandidate
from speedkit_jupyter.extras.data.loader_tuner import LoaderTuning
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import BLANK, CodeBlock, Row, Section, Table
from speedkit_jupyter.rounds.presentable import report_of
from speedkit_jupyter.rounds.statistics import INTERVAL
from speedkit_jupyter.support.units import between, count, ratio, seconds, share, size

COLUMNS = ("", "settings", "a batch", "waiting", "as fast as now", INTERVAL, "")
TAKE = "To write in its own line (… is as it is); `-v NAME` gives a variable the rebuilt loader"
UNDONE = (
    "Epochs of {:,} batches, their beginnings included. All that measuring did to model, optimizer "
    "and random state is undone; no worker is left."
)
WARNING = (
    "Another batch size is another training: gradients are averaged over more samples, and the "
    "learning rate has to be found anew (often it grows with the size, or with its root). Nothing "
    "was changed."
)
COUNTED = "The table counts tensors and arrays that Python knows of; what graphs kept is gone too."
GRAPHS = "with a graph: .detach() lets go of what it keeps"


@report_of.register
def loader_report(tuning: LoaderTuning) -> Document:
    """Return the choice first, then all that was measured."""
    rows = [_loader_row(tuning, one) for one in tuning.race.candidates]
    content = [
        Table(COLUMNS, rows, COLUMNS[2:6], wraps=("settings",)),
        "\n".join(tuning.remarks),
        Table(("not tried", "why"), list(tuning.declined.items())),
        Section(CodeBlock(tuning.source), TAKE) if tuning.is_changed else None,
        UNDONE.format(tuning.epoch),
    ]
    step = f"with `{tuning.against}`" if tuning.against else "loading alone"
    if found := tuning.ratio:
        headline = f"`{tuning.name}`, {tuning.chosen.settings.words}: {ratio(found.median)} as fast"
        headline += f" {step}, {INTERVAL} {between(found.low, found.high)}"
    else:
        headline = f"Leave `{tuning.name}` as it is: nothing was proven faster {step}"
        if tuning.against and tuning.race.own.times_s:
            headline += f" ({share(tuning.race.own.waiting)} of its time is waiting)"
    return Document(headline, content, tuning.to_dict())


def _loader_row(tuning: LoaderTuning, one: LoaderCandidate) -> Row:
    own, chosen = one is tuning.race.own, one is tuning.chosen
    found = None if own else tuning.race.ratio(one)
    notes = ["taken"] * chosen + [one.failure or one.why_out or "as it is" * own]
    cells = (
        "→" if chosen else "",
        one.settings.words,
        seconds(one.batch_s) if one.times_s else BLANK,
        share(one.waiting) if one.times_s else BLANK,
        ratio(found.median) if found else "",
        between(found.low, found.high) if found else "",
        ", ".join(filter(None, notes)),
    )
    return Row(cells, "bad" if one.failure else "good" if chosen and not own else "plain")


@report_of.register
def batch_report(found: BatchSizes) -> Document:
    """Return what to choose first, then each size."""
    if not found.measured:
        return Document("Nothing was measured")
    columns = ("batch", "a step", "samples a second", INTERVAL, "peak memory", "")
    memory = f"Batches: {found.source}, repeated where there are too few; loading is not timed."
    if found.available_bytes is not None and found.largest is not None:
        memory += (
            f" {size(found.available_bytes)} may be used; the largest is by the growth of memory, "
            "a tenth of it kept free, or by what was tried."
        )
    table = Table(columns, [_batch_row(found, one) for one in found.sizes], columns[:-1])
    return Document(_batch_headline(found), [table, memory, WARNING], found.to_dict())


def _batch_headline(found: BatchSizes) -> str:
    knee, fastest, subject = found.knee, found.fastest, f"`{found.subject}`"
    if len(found.measured) == 1:
        words = f"{subject}: no other batch size than {fastest.number:,} was measured"
    elif not found.is_proven:
        words = f"{subject}: too noisy to say which batch size is the fastest (--budget)"
    else:
        rate = f"{fastest.rate:,.0f} samples a second"
        words = f"{subject}: batches of {fastest.number:,} are the fastest ({rate})"
        if knee is not fastest:
            words += f"; {knee.number:,} give {share(knee.rate / fastest.rate)} of that"
    if found.largest is not None:
        most = max(one.number for one in found.measured)
        about = "at least" if found.largest in (most, FAR * most) else "about"
        unit = 10 ** max(len(str(found.largest)) - 2, 0)  # an estimate has two digits
        words += f"; {about} {found.largest // unit * unit:,} fit"
    return words


def _batch_row(found: BatchSizes, one: Size) -> Row:
    if not one.first_s:
        return Row((f"{one.number:,}", *[BLANK] * 4, one.why_not), "quiet")
    is_knee, is_fastest = (found.is_proven and one is it for it in (found.knee, found.fastest))
    notes = ["as it is"] * (one.number == found.now) + ["fastest"] * is_fastest
    notes += [f"knee: the smallest with {share(KNEE)} of the fastest"] * is_knee
    cells = (
        f"{one.number:,}",
        seconds(one.samples / one.rate),
        f"{one.rate:,.0f}",
        BLANK if one.interval is None else "{:,.0f} to {:,.0f}".format(*one.interval),
        BLANK if one.peak_bytes is None else size(one.peak_bytes),
        ", ".join(notes),
    )
    return Row(cells, "good" if is_knee else "plain")


@report_of.register
def free_report(freed: Freed) -> Document:
    """Return what held memory, and who holds what is left."""
    columns = ("held by", "held", "the largest of it", "gone with it")
    named = ("name", "holds", "the largest of it", "remark")
    let_go, kept = [], []
    for held in freed.let_go:
        number = f", {count(held.number, 'value')}" if held.number else ""
        let_go.append((held.name, size(held.bytes), held.what + number, held.loses or BLANK))
    for own in freed.kept:
        graphs = f"{count(own.graphs, 'tensor')} {GRAPHS}" if own.graphs else BLANK
        kept.append((own.name, size(own.bytes), own.what, graphs))
    before, after = freed.process_bytes
    lines = [f"This process: {size(before)} of main memory before, {size(after)} now."]
    headline = "Nothing to let go of: only your own names hold tensors"
    if let_go:
        lines.append(COUNTED)
        headline = f"Let go of {size(max(sum(one.bytes for one in freed.let_go), before - after))}"
        for name, (was, now) in freed.devices_bytes.items():
            headline += f"; on {name} {size(was)} became {size(now)}"
    names = Table(named, kept, named[1:2], wraps=named[2:3])
    own_names = Section(names, "Your own names, which were not touched")
    gone = Table(columns, let_go, columns[1:2], wraps=columns[2:3])
    return Document(headline, [gone, own_names, "\n".join(lines)], freed.to_dict())
