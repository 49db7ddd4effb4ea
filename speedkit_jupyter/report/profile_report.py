"""The report of a profile: the parts of a step, and the lines that wait."""

from __future__ import annotations

from collections.abc import Iterator

from speedkit_jupyter.measure.checks.counted_columns import QUANTITIES
from speedkit_jupyter.profiling import user_lines
from speedkit_jupyter.profiling.profile import Profile, Wait
from speedkit_jupyter.profiling.split import PARTS, Part
from speedkit_jupyter.report import costs_report
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Row, Section, Source, Table
from speedkit_jupyter.report.units import seconds
from speedkit_jupyter.support.words import count, share

ABOUT: dict[Part, str] = {
    "data": "waiting for the next batch",
    "host to device": "copies to the device",
    "forward": "modules, and what leads to the loss",
    "backward": "gradients",
    "optimizer": "step, zero_grad, clipping, GradScaler",
    "synchronizations": "Python waits for values of tensors",
    "compiling": "torch.compile at work",
    "rest": "Python, metrics, and all else",
}
# A bar of the table has so many characters for the whole step.
WIDTH = 24
# What has less of the step is no row.
LEAST = 0.0005
# A profiled call that takes longer than this is said to.
DEAR = 1.1
# Lines are listed up to so many, and none that takes less of the step.
MOST_LINES, LEAST_OF_A_LINE = 8, 0.02


def profile_report(profile: Profile) -> Document:
    """The parts in the order of a step, as table and as picture; then the lines that wait."""
    if not profile.taken:
        return Document("Nothing was profiled")
    parts = [part for part in PARTS if profile.share(part) >= LEAST or part == "rest"]
    rows = [
        Row((part, seconds(profile.seconds(part)), share(profile.share(part)),
             _bar(profile.share(part)), ABOUT[part]))
        for part in parts
    ]  # fmt: skip
    table = Table(
        ("part", "of a step", "share", "", "what it is"),
        tuple(rows),
        numbers=("of a step", "share"),
        optional=("what it is",),
    )
    sections = [Section(table)]
    if waits := profile.waits():
        sections.append(Section(_waits(profile, waits), "Synchronizations"))
    if lines := _lines(profile):
        sections.append(Section(lines, "Lines of your code, each without the lines that it calls"))
    sections += costs_report.sections(profile)
    sections.append(Section("\n".join(_notes(profile))))
    return Document(_headline(profile), tuple(sections), profile.to_dict())


def _headline(profile: Profile) -> str:
    first, second = sorted(PARTS, key=profile.share, reverse=True)[:2]
    of_a_call = f" ({profile.steps} in a call)" if profile.steps > 1 else ""
    return (
        f"{seconds(profile.step_s)} a step{of_a_call}: {share(profile.share(first))} {first}, "
        f"{share(profile.share(second))} {second}"
    )


def _waits(profile: Profile, waits: list[Wait]) -> Table:
    rows = [
        Row((profile.place(wait.line), f"{wait.times:.3g}", seconds(wait.seconds),
             Source(user_lines.source(wait.line.file, wait.line.number) or wait.line.call)))
        for wait in waits[:MOST_LINES]
    ]  # fmt: skip
    return Table(
        ("where", "times a step", "of a step", "line"),
        tuple(rows),
        numbers=("times a step", "of a step"),
    )


def _lines(profile: Profile) -> Table | None:
    rows = [
        Row((profile.place(spot), seconds(part * profile.step_s), share(part),
             profile.lines.part(spot), Source(user_lines.source(spot.file, spot.number))))
        for spot, part in profile.lines.costliest()[:MOST_LINES]
        if part >= LEAST_OF_A_LINE
    ]  # fmt: skip
    columns = ("where", "of a step", "share", "mostly", "line")
    return Table(columns, tuple(rows), numbers=("of a step", "share")) if rows else None


def _notes(profile: Profile) -> Iterator[str]:
    waits = profile.waits()
    if len(waits) > MOST_LINES:
        yield f"{len(waits) - MOST_LINES} more lines wait, each for less."
    if waits and profile.device == "cpu":
        yield "On a CPU these lines wait for nothing; on a GPU each one waits until it is idle."
    for quantity in QUANTITIES:
        values, each = profile.quantities(), quantity.of_a_sample
        if (value := values.get(quantity.name)) is not None:
            words = f"{value:.3g} {quantity.unit}".strip() + " a step"
            if each.name in values:
                words += f", {values[each.name]:.3g} {quantity.unit}".rstrip() + " a sample"
            yield f"{quantity.title.capitalize()}: {words}, by the device's own counter."
    calls = count(len(profile.taken), "profiled call")
    if profile.cost is None:
        yield f"{calls}: the first one took too long for a second."
        return
    yield f"{calls}, each of them {profile.cost:.2f} times as long as a plain one in between."
    if profile.cost > DEAR:
        yield "Seconds are those of the plain calls; of so short parts the shares are rough."
    if profile.first is not None and (compiling_s := profile.first.seconds["compiling"]) > 0:
        yield f"Before, the first call compiled for {seconds(compiling_s)}."


def _bar(part: float) -> str:
    """In eighths of a character."""
    whole, eighths = divmod(int(part * WIDTH * 8 + 0.5), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths].strip()
