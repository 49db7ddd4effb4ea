"""The report of a check: passed or not and why, then each size."""

from __future__ import annotations

from statistics import median

from speedkit_jupyter.extras.check.result import Check, SizeCheck
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import BLANK, Row, Section, Table
from speedkit_jupyter.rounds.presentable import report_of
from speedkit_jupyter.rounds.statistics import INTERVAL
from speedkit_jupyter.support.units import between, count, ratio, seconds, size

COLUMNS = (
    *("size", "result", "reference", "candidate"),
    *("speed-up", INTERVAL, "peak memory", "off by"),
)
TENSORS = ("tensor", "off by", "rounding explains", "of its limit")
OFF = "“off by” is the norm of the difference to float64, over the norm."
HERE = (
    "Both ran in this process, where code that means to deceive can. `python -m "
    "speedkit_jupyter.check` runs each in a process of its own."
)


@report_of.register
def check_report(found: Check) -> Document:
    """Return the verdict, the faults, a row for each size, each tensor of the last one."""
    checked = [one for one in found.sizes if not (one.skipped or one.unchecked)]
    headline = f"{found.candidate} is {found.verdict}"
    if found.passed:
        largest = checked[-1].ratio
        headline += f" at {count(len(checked), 'size')}"
        if largest and largest.verdict == "too noisy":
            headline += f"; too noisy to say how fast at `{checked[-1].name}`"
        elif largest:
            headline += f"; at `{checked[-1].name}` {largest} as fast as {found.reference}"
        elif checked[-1].untold:
            headline += "; how fast is not told"
    skipped = [f"{one.name} is skipped: {one.skipped}." for one in found.sizes if one.skipped]
    skipped += [f"{one.name}: {one.unchecked}." for one in found.sizes if one.unchecked]
    skipped += [f"{one.name}: no speed is told: {one.untold}." for one in found.sizes if one.untold]
    content = [
        "\n".join(found.faults),
        Table(COLUMNS, [_row(one) for one in found.sizes], COLUMNS[2:6], wraps=("result",)),
        "\n".join([*skipped, *found.remarks, *([] if found.isolated else [HERE]), OFF]),
        *(_tensors(one) for one in checked[-1:]),
    ]
    return Document(headline, content, found.to_dict())


def _tensors(one: SizeCheck) -> Section:
    """Return how far each tensor of a size is off."""
    rows = [
        (each.name, f"{each.distance:.2g}", f"{each.explained:.2g}", f"{each.excess:.2g}")
        for each in one.agreements
    ]
    return Section(Table(TENSORS, rows, TENSORS[1:]), f"Each tensor at `{one.name}`", folded=True)


def _row(one: SizeCheck) -> Row:
    name = f"{one.name} {'×'.join(map(str, one.size))}" if isinstance(one.size, tuple) else one.name
    if one.skipped or one.unchecked:
        return Row((name, "skipped" if one.skipped else "not checked", *[BLANK] * 6), "quiet")
    speed, worst, sides = one.ratio, one.worst, (one.reference, one.candidate)
    peaks = [side.memory.peak_bytes if side.memory else None for side in sides]
    cells = (
        name,
        "wrong" if one.faults else f"right, {speed.verdict}" if speed else "right",
        *(seconds(median(side.times_s)) if side.times_s else BLANK for side in sides),
        ratio(speed.median) if speed else BLANK,
        between(speed.low, speed.high) if speed else BLANK,
        " → ".join(BLANK if each is None else size(each) for each in peaks),
        f"{worst.distance:.2g}" if worst else BLANK,
    )
    return Row(cells, "bad" if one.faults else "good")
