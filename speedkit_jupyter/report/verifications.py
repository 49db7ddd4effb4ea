"""Reports about verifications: two loss curves, and how far apart they lie."""

from __future__ import annotations

from speedkit_jupyter.report.document import Document, Picture, Row, Section, Table, Tone
from speedkit_jupyter.report.units import count
from speedkit_jupyter.tuning.verification import Verification

WORDS = {
    "same": "the loss curve is the baseline's",
    "different": "the loss curve is another than the baseline's, and does not end above it",
    "worse": "the loss ends above the baseline's",
    "failed": "it failed",
}
TONES: dict[str, Tone] = {"same": "good", "different": "plain", "worse": "bad", "failed": "bad"}


def verification_report(found: Verification) -> Document:
    """The verdict with its numbers, the curves, and some steps of them."""
    verdict = found.verdict
    steps = count(len(found.baseline), "step")
    title = f"{found.name}: {WORDS[verdict]} over {steps}"
    if found.subject:
        title = f"{found.subject}: {title}"
    if found.failure:
        return Document(title, (Section(found.failure),), found.to_dict())
    sections = [Section(_distances(found))]
    if found.planned:
        sections.append(Section(Picture(lambda: _curves(found), "The loss curves")))
        sections.append(Section(_steps(found)))
    sections.append(
        Section("All that the runs did to model, optimizer and random state is undone.")
    )
    return Document(title, tuple(sections), found.to_dict())


def _distances(found: Verification) -> Table:
    other = (
        "a baseline whose weights were rounded once (the step draws no random numbers)"
        if found.by_weights
        else "a baseline with another seed"
    )
    rows = (
        Row((found.name, f"{found.distance:.3g}"), TONES[found.verdict]),
        Row((other, f"{found.yardstick:.3g}")),
        Row(("allowed: twice that, or 1 % of what the loss changes by", f"{found.allowed:.3g}")),
    )
    return Table(("distance from the baseline's losses", "root mean square"), rows,
                 ("root mean square",))  # fmt: skip


def _steps(found: Verification) -> Table:
    last = min(len(found.baseline), len(found.planned)) - 1
    chosen = sorted({0, last // 4, last // 2, 3 * last // 4, last})
    columns = ("step", "baseline", found.name, "other baseline")
    rows = tuple(
        Row(
            (
                str(index + 1),
                *(
                    f"{losses[index]:.5g}" if index < len(losses) else "–"
                    for losses in (found.baseline, found.planned, found.other_seed)
                ),
            )
        )
        for index in chosen
    )
    return Table(columns, rows, columns)


def _curves(found: Verification) -> bytes:
    from speedkit_jupyter.report import plots

    return plots.as_png(plots.loss_curves(found))
