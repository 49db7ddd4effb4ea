"""Reports about verifications: loss curves, and how far apart they lie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Picture, Row, Section, Table, Tone
from speedkit_jupyter.report.score_words import change, precision, score_table
from speedkit_jupyter.support.words import count
from speedkit_jupyter.tuning.curves import RAN_ON, Curve
from speedkit_jupyter.tuning.verification import Verification

WORDS = {
    "same": "same loss curve as the baseline",
    "different": "another loss curve than the baseline, which does not end above it",
    "worse": "the loss ends above the baseline's",
    "failed": "it failed",
    "accepted": "accepted",
    "other model": "the results change",
}
TONES: dict[str, Tone] = {"same": "good", "different": "plain", "worse": "bad"}
ALLOWED = "allowed: twice that, 1 % of what the loss changes by, or its own rounding"
HINT = ". A step that scales its loss by itself should return it: what it returns is compared"


def verification_report(result: Verification) -> Document:
    """Return the verdict with its numbers, the curves, and some steps of them."""
    verdict = result.verdict
    calls = count(len(result.runs.baseline), "call")
    title = f"{result.name}: {WORDS[verdict]}"
    if result.score is not None and not result.failure:
        title += f": {change(result.score)}"
    if result.runs.baseline:
        title += f" {'over' if result.score is None else 'after'} {calls} of the step"
    if result.subject:
        title = f"{result.subject}: {title}"
    if result.failure:
        return Document(title, (Section(result.failure),), result.to_dict())
    curves = result.curves
    sections = [*_scored(result), *_given_up(result)]
    sections += [
        section for curve in curves for section in _sections(result, curve, len(curves) > 1)
    ]
    sections.append(
        Section("All that the runs did to model, optimizer and random state is undone.")
    )
    return Document(title, tuple(sections), result.to_dict())


def _scored(result: Verification) -> Iterator[Section]:
    """The number that the user has named, which decides."""
    score = result.score
    if score is None:
        return
    yield Section(score_table(score, result.name))
    if note := precision(score):
        yield Section(note)


def _given_up(result: Verification) -> Iterator[Section]:
    """What another model is, and what its losses show of that: at once, and at the end."""
    if not result.changes_model:
        return
    words, loss = " and ".join(result.changes_model), result.loss
    notes = [f"{name}: {note}." for name, note in result.notes.items()]
    told = "; what that gives up:" if notes or loss.baseline else "."
    yield Section("\n".join([f"{words} changes the results{told}", *notes]))
    if not loss.baseline:
        return
    runs = [run for run in (loss.baseline, loss.planned, loss.other) if run]
    rows = (
        Row(("the first loss, from the same weights", *(f"{run[0]:.5g}" for run in runs))),
        Row((f"the mean of the last {loss.last}", *(f"{loss.end_of(run):.5g}" for run in runs))),
    )
    columns = ("", "baseline", result.name, "other baseline")[: len(runs) + 1]
    yield Section(Table(columns, rows, columns[1:]))


def _sections(result: Verification, curve: Curve, is_one_of_several: bool) -> Iterator[Section]:
    """What is said of one curve."""
    verdict = f" ({WORDS[curve.agreement]})" if is_one_of_several else ""
    hint = HINT if curve.what == RAN_ON and not is_one_of_several else ""
    yield Section(f"Compared is {curve.what}{verdict}{hint}.")
    yield Section(_distances(result, curve))
    if curve.planned:
        yield Section(Picture(partial(_picture, result, curve), f"The curves of {curve.what}"))
        yield Section(_steps(result.name, curve))


def _distances(result: Verification, curve: Curve) -> Table:
    label = (
        "a baseline whose weights were rounded once (the step draws no random numbers)"
        if result.by_weights
        else "a baseline with another seed"
    )
    if len(curve.others) > 1:
        label += f": the farthest of {len(curve.others)}"
    rows = (
        Row((result.name, f"{curve.distance:.3g}"), TONES[curve.agreement]),
        Row((label, f"{curve.yardstick:.3g}")),
        Row((ALLOWED, f"{curve.allowed:.3g}")),
    )
    columns = ("distance from the baseline's losses", "root mean square")
    return Table(columns, rows, columns[1:], wraps=columns[:1])


def _steps(name: str, curve: Curve) -> Table:
    last = min(len(curve.baseline), len(curve.planned)) - 1
    chosen = sorted({0, last // 4, last // 2, 3 * last // 4, last})
    columns = ("call", "baseline", name, "other baseline")
    rows = tuple(
        Row(
            (
                str(index + 1),
                *(
                    f"{losses[index]:.{_digits(curve)}g}" if index < len(losses) else "–"
                    for losses in (curve.baseline, curve.planned, curve.other)
                ),
            )
        )
        for index in chosen
    )
    return Table(columns, rows, columns)


def _digits(curve: Curve) -> int:
    """Significant digits that show what is judged."""
    largest = max((abs(loss) for loss in curve.baseline if math.isfinite(loss)), default=0.0)
    smallest = max(curve.distance, curve.allowed)
    if not largest or not smallest or not math.isfinite(smallest):
        return 5
    return min(max(5, math.ceil(math.log10(largest / smallest)) + 2), 15)


def _picture(result: Verification, curve: Curve) -> bytes:
    from speedkit_jupyter.report import plots

    label = "baseline, rounded weights" if result.by_weights else "baseline, other seed"
    return plots.as_png(plots.loss_curves(curve, result.name, label))
