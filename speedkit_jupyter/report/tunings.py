"""Reports about tuning: the winner, what each part adds, what was rejected and why."""

from __future__ import annotations

from speedkit_jupyter.report.comparisons import describe_verdict
from speedkit_jupyter.report.document import Code, Document, Picture, Row, Section, Table
from speedkit_jupyter.report.units import ratio, seconds, size
from speedkit_jupyter.tuning.result import Tuning


def tuning_report(tuning: Tuning) -> Document:
    """What to do, what it was proven to bring, and everything that was tried."""
    sections = []
    if tuning.helped:
        sections.append(Section(_parts(tuning), "What each part brings alone"))
        sections += _picture(tuning)
    if tuning.rejected:
        rows = tuple(Row((one.name, one.reason)) for one in tuning.rejected)
        sections.append(Section(Table(("tried", "why it is not in the plan"), rows)))
    untouched = "Model, optimizer and random state are as before; nothing is applied."
    sections.append(Section(untouched))
    if tuning.helped:
        again = f"%%speedbench --compare baseline,{tuning.winner.name}"
        sections.append(Section(Code(f"contexts = tuning.apply()  # or measure again: {again}")))
    return Document(_headline(tuning), tuple(sections), tuning.to_dict())


def _headline(tuning: Tuning) -> str:
    took = f"searched for {seconds(tuning.seconds)}" if tuning.seconds else "interrupted"
    if not tuning.helped or tuning.comparison is None:
        return f"Leave it as it is: nothing was proven better here ({took})"
    record = tuning.comparison.records[1]
    found = describe_verdict(tuning.comparison, record)
    return f"{tuning.winner.name} is {found}, confirmed in fresh rounds ({took})"


def _parts(tuning: Tuning) -> Table:
    rows = [Row((name, ratio(value))) for name, value in tuning.parts()]
    assert tuning.comparison is not None
    record = tuning.comparison.records[1]
    found = tuning.comparison.ratio(record)
    whole = "–" if found is None else f"{ratio(found.median)}"
    rows.append(Row((f"together: {tuning.winner.name}", whole), "good"))
    before, after = tuning.comparison.baseline.memory, record.memory
    if before is not None and after is not None:
        memory = f"{size(before.peak_bytes)} before, {size(after.peak_bytes)} now"
        rows.append(Row(("peak memory of a step", memory)))
    return Table(("part", "speed-up over baseline"), tuple(rows))


def _picture(tuning: Tuning) -> list[Section]:
    parts = tuning.parts()
    comparison = tuning.comparison
    if len(parts) < 2 or comparison is None:
        return []

    def png() -> bytes:
        from speedkit_jupyter.report import plots

        return plots.as_png(plots.parts(parts, tuning.winner.name, comparison))

    return [Section(Picture(png, "Speed-up of each part alone and of all together"))]
