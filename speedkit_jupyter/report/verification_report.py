"""The report of a verification: loss curves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speedkit_jupyter.report import elements
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.search.verification import Curve, Verification
from speedkit_jupyter.support.units import count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORDS = {
    "same": "same loss curve as the baseline",
    "different": "another loss curve than the baseline, but it does not end higher",
    "worse": "the loss ends above the baseline's",
    "failed": "it failed",
}
TONES: dict[str, elements.Tone] = {"same": "good", "different": "plain", "worse": "bad"}
ALLOWED = "allowed: twice that, 1 % of the change of the loss, or the plan's own rounding"
OTHER = "a baseline with another seed and with once-rounded weights"
DISTANCE = ("distance from the baseline's losses", "root mean square")


def verification_report(result: Verification) -> Document:
    """Return the verdict with its numbers, and the loss curves."""
    headline = f"{result.subject}: " if result.subject else ""
    headline += f"{result.name}: {WORDS[result.verdict]}"
    if runs := next(iter(result.runs), []):
        headline += f" over {count(len(runs), 'call')} of the step"
    if result.failure:
        return Document(headline, [result.failure], result.to_dict())
    curves = [body for curve in result.curves for body in _curve(result, curve)]
    return Document(headline, [*curves, elements.AS_BEFORE], result.to_dict())


def _curve(result: Verification, curve: Curve) -> list[Any]:
    """Return a section with the distance, its limit and the picture."""
    is_alone = len(result.curves) == 1
    verdict = "" if is_alone else f" ({WORDS[curve.agreement]})"
    farthest = f": the farthest of {len(curve.others)}" if len(curve.others) > 1 else ""
    rows = [
        elements.Row((result.name, f"{curve.distance:.3g}"), TONES[curve.agreement]),
        (f"{OTHER}{farthest}", f"{curve.yardstick:.3g}"),
        (ALLOWED, f"{curve.allowed:.3g}"),
    ]
    distances = elements.Table(DISTANCE, rows, DISTANCE[1:], wraps=DISTANCE[:1])
    content = [f"Compared: {curve.what}{verdict}.", distances]
    if not curve.planned:
        return content
    png = lambda: elements.as_png(loss_curves(curve, result.name))  # noqa: E731
    picture = elements.Picture(png, f"The curves of {curve.what}")
    return [*content, picture]


def loss_curves(curve: Curve, name: str) -> Figure:
    """Return a figure of the losses of baseline, plan (`name`) and a second baseline."""
    axes = elements.axes_of(3.2, "call of the step")
    curves: tuple[tuple[list[float], str, Any], ...] = (
        (curve.other, "another baseline", {"color": elements.NEUTRAL, "linestyle": ":"}),
        (curve.baseline, "baseline", {"color": elements.NEUTRAL, "linewidth": 2.5}),
        (curve.planned, name, {"color": elements.PLANNED, "linestyle": "--"}),
    )
    for losses, label, style in curves:
        axes.plot(range(1, len(losses) + 1), losses, label=label, **style)
    axes.set_ylabel("loss", color=elements.NEUTRAL)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, labelcolor=elements.NEUTRAL)
    return axes.figure  # type: ignore[no-any-return]
