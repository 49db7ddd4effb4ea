"""The report of a verification: loss curves, and the number that the user has named."""

from __future__ import annotations

from typing import Any

from speedkit_jupyter.report import plots
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import AS_BEFORE, BLANK, Picture, Row, Table, Tone
from speedkit_jupyter.right.named_accuracy import SHARE, YARDSTICKS, Scored
from speedkit_jupyter.search.curves import RAN_ON, Curve
from speedkit_jupyter.search.verification import Verification
from speedkit_jupyter.support.units import count, share

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
    score, runs = result.score, next(iter(result.runs), [])
    headline = f"{result.subject}: " if result.subject else ""
    headline += f"{result.name}: {WORDS[result.verdict]}"
    if score is not None and not result.failure:
        headline += f": {change(score)}"
    if runs:
        when = "over" if score is None else "after"
        headline += f" {when} {count(len(runs), 'call')} of the step"
    if result.failure:
        return Document(headline, [result.failure], result.to_dict())
    numbers = score_table(score, result.name) if score else None
    curves = [body for curve in result.curves for body in _curve(result, curve)]
    content = [numbers, _given_up(result), *curves, AS_BEFORE]
    return Document(headline, content, result.to_dict())


def _given_up(result: Verification) -> str:
    if not result.changes_model:
        return ""
    loss = result.loss
    lines = [f"{' and '.join(result.changes_model)} changes the results."]
    lines += [f"{name}: {note}." for name, note in result.notes.items()]
    if loss.baseline and loss.planned:
        ends = f"{loss.end_of(loss.baseline):.5g} → {loss.end_of(loss.planned):.5g}"
        lines.append(f"The mean of the last {loss.last} losses: {ends}.")
    return "\n".join(lines)


def _curve(result: Verification, curve: Curve) -> list[Any]:
    """Return the distance and its limit, the picture, and the losses of five calls."""
    is_alone = len(result.curves) == 1
    hint = HINT if curve.what == RAN_ON and is_alone else ""
    verdict = "" if is_alone else f" ({WORDS[curve.agreement]})"
    label, drawn = "a baseline with another seed", "baseline, other seed"
    if result.by_weights:
        label = "a baseline whose weights were rounded once (the step draws no random numbers)"
        drawn = "baseline, rounded weights"
    if len(curve.others) > 1:
        label += f": the farthest of {len(curve.others)}"
    rows = [
        Row((result.name, f"{curve.distance:.3g}"), TONES[curve.agreement]),
        (label, f"{curve.yardstick:.3g}"),
        (ALLOWED, f"{curve.allowed:.3g}"),
    ]
    columns = ("distance from the baseline's losses", "root mean square")
    distances = Table(columns, rows, columns[1:], wraps=columns[:1])
    content = [f"Compared: {curve.what}{verdict}{hint}.", distances]
    if not curve.planned:
        return content
    last = min(len(curve.baseline), len(curve.planned)) - 1
    runs = (curve.baseline, curve.planned, curve.other)
    calls = [
        (str(at + 1), *(f"{run[at]:.6g}" if at < len(run) else BLANK for run in runs))
        for at in sorted({0, last // 4, last // 2, 3 * last // 4, last})
    ]
    titles = ("call", "baseline", result.name, "other baseline")
    picture = Picture(
        lambda: plots.as_png(plots.loss_curves(curve, result.name, drawn)),
        f"The curves of {curve.what}",
    )
    return [*content, picture, Table(titles, calls, titles)]


# --- the number that the user has named ---


def shown(value: float) -> str:
    """Return a value in six digits, which tell apart a small loss and its limit."""
    return f"{value:.6g}"


def change(score: Scored) -> str:
    """Return `evaluate 0.912 → 0.908`."""
    if score.after is None:
        return score.failure
    before, after = map(shown, (score.before, score.after))
    return f"{score.function} {before} → {after}"


def judged(score: Scored) -> str:
    """Return the change with the loss of accuracy, its limit, and whether it is accepted."""
    if score.after is None:
        return f"{change(score)}: not accepted"
    allowed = f"{score.allowed:.2g} is allowed ({_why(score)}; {score.better} is better)"
    verdict = "accepted" if score.is_accepted else "not accepted"
    return f"{change(score)}: {verdict}, {_lost(score)} is given up, {allowed}"


def score_table(score: Scored, name: str) -> Table:
    """Return the number before and after, the loss of accuracy, and its limit."""
    after = BLANK if score.after is None else shown(score.after)
    rows: list[Row | tuple[str, ...]] = [(score.function, shown(score.before), after)]
    if score.others:
        others = dict.fromkeys(shown(end) for end in (min(score.others), max(score.others)))
        rows.append(("other baselines", " to ".join(others), ""))
    tone: Tone = "good" if score.is_accepted else "bad"
    rows.append(Row((f"given up ({score.better} is better)", "", _lost(score)), tone))
    rows.append((f"allowed ({_why(score)})", "", f"{score.allowed:.2g}"))
    columns = ("", "baseline", name)
    return Table(columns, rows, columns[1:])


def _lost(score: Scored) -> str:
    if score.after is None:
        return BLANK
    return f"{score.lost:.2g}" if score.lost > 0 else "nothing"


def _why(score: Scored) -> str:
    if score.asked is not None:
        return "as you said"
    if YARDSTICKS * score.spread > SHARE * abs(score.before):
        return f"{YARDSTICKS:g} times as far as another baseline's is"
    return f"{share(SHARE)} of the baseline's"
