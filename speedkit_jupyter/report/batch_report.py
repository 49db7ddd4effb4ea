"""The report of batch sizes: the knee, the fastest, the largest, and the curve."""

from __future__ import annotations

from functools import partial

from speedkit_jupyter.batching.batch_sizes import KNEE, BatchSizes, Size
from speedkit_jupyter.batching.sweep import FAR
from speedkit_jupyter.measure.results.statistics import INTERVAL
from speedkit_jupyter.report import plots
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Picture, Row, Section, Table
from speedkit_jupyter.report.units import seconds, size, with_unit
from speedkit_jupyter.support.words import share

ENERGY = "energy a sample"
WARNING = (
    "Another batch size is another training: gradients are averaged over more samples, and the "
    "learning rate has to be found anew (often it grows with the size, or with its root). Nothing "
    "was changed."
)


def batch_report(found: BatchSizes) -> Document:
    """What to choose first, then each size."""
    if not found.measured:
        return Document("Nothing was measured")
    counts = any(one.energy_j is not None for one in found.sizes)
    columns = ["batch", "a step", "samples a second", INTERVAL, "peak memory"]
    columns += [ENERGY] * counts + [""]
    rows = tuple(_row(found, one, counts) for one in found.sizes)
    sections = [
        Section(Table(tuple(columns), rows, tuple(columns[:-1]))),
        Section(Picture(partial(_png, found), _headline(found))),
        Section(_about_memory(found)),
        Section(WARNING),
    ]
    return Document(_headline(found), tuple(sections), found.to_dict())


def _headline(found: BatchSizes) -> str:
    knee, fastest = found.knee, found.fastest
    words = f"`{found.subject}`: batches of {fastest.number:,} are the fastest "
    words += f"({fastest.rate:,.0f} samples a second)"
    if not found.is_proven:
        words = f"`{found.subject}`: too noisy to say which batch size is the fastest (--budget)"
    elif knee is not fastest:
        words += f"; {knee.number:,} give {share(knee.rate / fastest.rate)} of that"
    if found.largest is not None:
        most = max(one.number for one in found.measured)
        about = "at least" if found.largest in (most, FAR * most) else "about"
        words += f"; {about} {_rounded(found.largest):,} fit"
    return words


def _row(found: BatchSizes, one: Size, counts: bool) -> Row:
    if not one.first_s:
        return Row((f"{one.number:,}", "–", "–", "–", "–", *["–"] * counts, one.why_not), "quiet")
    is_knee, is_fastest = (found.is_proven and one is it for it in (found.knee, found.fastest))
    notes = ["as it is"] * (one.number == found.now) + ["fastest"] * is_fastest
    notes += [f"knee: the smallest with {share(KNEE)} of the fastest"] * is_knee
    interval = "–" if one.interval is None else "{:,.0f} to {:,.0f}".format(*one.interval)
    energy = "–" if one.energy_j is None else with_unit(one.energy_j, "J")
    cells = (
        f"{one.number:,}",
        seconds(one.samples / one.rate),
        f"{one.rate:,.0f}",
        interval,
        "–" if one.peak_bytes is None else size(one.peak_bytes),
        *[energy] * counts,
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
