"""The report of advice: what to do, what it is expected to bring, and why."""

from __future__ import annotations

from collections.abc import Iterator

from speedkit_jupyter.advice.advice import Advice, Opportunity
from speedkit_jupyter.profiling.split import PARTS
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Folded, Row, Section, Table
from speedkit_jupyter.report.units import seconds
from speedkit_jupyter.support.words import share

# So many are listed.
MOST = 8
# What tries a remedy that only the user can write.
BY_HAND = "%%speedbench --save NAME, before and after"


def advice_report(advice: Advice) -> Document:
    """Return the opportunities, that with the largest expected gain first."""
    profile = advice.profile
    if not profile.taken:
        return Document("Nothing was measured")
    found = advice.opportunities[:MOST]
    sections = []
    if found:
        sections.append(Section(_opportunities(found)))
        sections.append(Section(_remedies(found), "What to write"))
    parts = [part for part in PARTS if profile.share(part) >= 0.005]
    spoken = ", ".join(f"{part} {share(profile.share(part))}" for part in parts)
    sections.append(Section(f"The step: {spoken}."))
    sections.append(Section("\n".join(_notes(advice))))
    sections.append(Section(Folded("\n".join(_more(advice)))))
    return Document(_headline(advice), tuple(sections), advice.to_dict())


def _headline(advice: Advice) -> str:
    of = f" of `{advice.subject}`" if advice.subject else ""
    step = f"{seconds(advice.profile.step_s)} a step{of}"
    if not advice.opportunities:
        return f"{step}: no known reason why it would be slow"
    number = len(advice.opportunities)
    many = "1 opportunity" if number == 1 else f"{number} opportunities"
    return f"{step}: {many}, the first {advice.opportunities[0].gain}"


def _opportunities(found: list[Opportunity]) -> Table:
    rows = [
        Row((str(number), one.title, str(one.gain), one.evidence))
        for number, one in enumerate(found, 1)
    ]
    return Table(
        ("", "opportunity", "expected, whole step", "because"),
        tuple(rows),
        numbers=("",),
        wraps=("opportunity",),
        least_last=40,
    )


def _remedies(found: list[Opportunity]) -> Table:
    rows = [
        Row((str(number), one.remedy, try_line(one, number), one.risk))
        for number, one in enumerate(found, 1)
    ]
    return Table(
        ("", "write", "measure it", "risk"),
        tuple(rows),
        numbers=("",),
        wraps=("write", "measure it"),
        least_last=30,
    )


def try_line(one: Opportunity, number: int) -> str:
    """Return the line that compares the step as it is with the step as it would be."""
    return f"%speedkit advise --try {number}" if one.variant or one.trial else BY_HAND


def _notes(advice: Advice) -> Iterator[str]:
    if len(advice.opportunities) > MOST:
        yield f"{len(advice.opportunities) - MOST} more gain less: in the result's rows()."
    if advice.opportunities:
        yield "Expected is what the split allows (Amdahl), not a promise: the comparison measures."
    yield "What switches bring (precision, compile, layouts) is measured by %%speedbench --tune."
    for rule, why in advice.skipped.items():
        yield f"{rule}: not looked at ({why})"


def _more(advice: Advice) -> Iterator[str]:
    yield (
        "A range is computed from the share of the step that the remedy concerns, and from how "
        "many times as fast that part gets at least and at most; shares are those of "
        "%%speedbench --profile. Several opportunities do not add up where they are about one part."
    )
    for wait in advice.profile.waits():
        yield f"{advice.profile.place(wait.line)}: waits {wait.times:.3g} times a step"
