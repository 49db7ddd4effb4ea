"""The number that the user has named: before and after, what was given up, and the verdict."""

from __future__ import annotations

import math

from speedkit_jupyter.measure.checks.scores import SHARE, YARDSTICKS, Score, Scored
from speedkit_jupyter.measure.results.statistics import INTERVAL
from speedkit_jupyter.report.elements import Row, Table, Tone
from speedkit_jupyter.support.words import count, share

FEWEST, MOST = 4, 12


def shown(score: Scored, value: float) -> str:
    """Return a value with as many digits as tell apart what is given up and allowed."""
    after = score.before.value if score.after is None else score.after.value
    largest = max(abs(score.before.value), abs(after))
    small = [number for number in (score.allowed, abs(score.before.value - after)) if number]
    spread = math.ceil(math.log10(largest / min(small))) if small and largest else 0
    return f"{value:.{min(max(spread + 2, FEWEST), MOST)}g}"


def change(score: Scored) -> str:
    """Return `evaluate 0.912 → 0.908`."""
    if score.after is None:
        return score.failure
    before, after = (shown(score, side.value) for side in (score.before, score.after))
    return f"{score.function} {before} → {after}"


def judged(score: Scored) -> str:
    """Return the same with what was given up, what is allowed, and what follows."""
    if score.after is None:
        return f"{change(score)}: not accepted"
    allowed = f"{score.allowed:.2g} is allowed ({_why(score)}; {score.better} is better)"
    verdict = "accepted" if score.is_accepted else "not accepted"
    return f"{change(score)}: {verdict}, {_lost(score)} is given up, {allowed}"


def score_table(score: Scored, name: str) -> Table:
    """Return the number with its interval, what is given up, and what is allowed."""
    values = [_cell(score, score.before), _cell(score, score.after)]
    rows = [Row((score.function, *values))]
    if score.before.interval or (score.after and score.after.interval):
        intervals = [_interval(score, score.before), _interval(score, score.after)]
        rows.append(Row((INTERVAL, *intervals)))
    if score.others:
        others = f"{shown(score, min(score.others))} to {shown(score, max(score.others))}"
        alone = shown(score, score.others[0])
        rows.append(Row(("other baselines", others if len(score.others) > 1 else alone, "")))
    tone: Tone = "good" if score.is_accepted else "bad"
    rows.append(Row((f"given up ({score.better} is better)", "", _lost(score)), tone))
    rows.append(Row((f"allowed ({_why(score)})", "", f"{score.allowed:.2g}")))
    columns = ("", "baseline", name)
    return Table(columns, tuple(rows), columns[1:])


def precision(score: Scored) -> str:
    """Return that so few examples do not tell what is allowed; empty where they do."""
    known = score.before.interval
    if known is None or score.before.examples is None:
        return ""
    half = (known[1] - known[0]) / 2
    if half <= score.allowed:
        return ""
    return (
        f"{count(score.before.examples, 'example')} tell such a share to ±{half:.2g}, which is "
        "more than is allowed: on others of their kind it may lose more, or nothing."
    )


def _lost(score: Scored) -> str:
    if score.after is None:
        return "–"
    return f"{score.lost:.2g}" if score.lost > 0 else "nothing"


def _why(score: Scored) -> str:
    if score.asked is not None:
        return "as you said"
    if YARDSTICKS * score.spread > SHARE * abs(score.before.value):
        return f"{YARDSTICKS:g} times as far as another baseline's is"
    return f"{share(SHARE)} of the baseline's"


def _cell(score: Scored, side: Score | None) -> str:
    if side is None:
        return "–"
    counted = "" if side.examples is None else f" ({side.right:,} of {side.examples:,})"
    return f"{shown(score, side.value)}{counted}"


def _interval(score: Scored, side: Score | None) -> str:
    if side is None or side.interval is None:
        return "–"
    low, high = side.interval
    return f"{low:.3g} to {high:.3g}"
