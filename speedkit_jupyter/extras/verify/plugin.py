"""The magic `%speedkit verify`, and its report: loss curves with and without a plan."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.extras.verify.verification import STEPS, Curve, Verification, Verifier
from speedkit_jupyter.notebook import namespace, options
from speedkit_jupyter.notebook.options import Names, Option, command, whole_number
from speedkit_jupyter.notebook.plugins import Plugin
from speedkit_jupyter.notebook.progress import run_and_show
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.report import elements, rendering
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.search import learning
from speedkit_jupyter.search.outcome import MEMORY
from speedkit_jupyter.step.step import Step, over_batches, step_of
from speedkit_jupyter.step.variants import AUTO, CURRENT
from speedkit_jupyter.support.units import count

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@command(
    "train with and without a plan, and compare the loss curves",
    Option("--steps", "NUMBER", f"calls in each run ({STEPS})", type=whole_number, default=STEPS),
    options.step("the training function (default: the last %%speedbench cell)"),
    Option("--plan", "NAME", "(default: the plan tuned, applied or learned)", options.plans),
    options.RESULT,
)
def verify(names: Names, session: Session, arguments: Namespace) -> None:
    step, title = _trained(names, session, arguments.step)
    plan = arguments.plan or _plan(session, step)
    verifier = Verifier(step, plan, arguments.steps, f"`{title}`")
    run_and_show(verifier, f"verifying {title}", names, arguments.v)


def _trained(names: Names, session: Session, name: str | None) -> tuple[Step, str]:
    """Return the step to verify, and its title. Without `name`, take the last cell."""
    if name is None:
        cell = session.last_cell()
        return cell.step(), cell.title
    function = namespace.find_function(names, name)
    return step_of(over_batches(function, None, name, "write a function that returns one")), name


def _plan(session: Session, step: Step) -> Any:
    if not step.models:
        return AUTO
    if (found := MEMORY.of(step.models[0])) and found.is_newer and found.proof:
        return found.config
    if any(applied_to(model) is not None for model in step.models):
        return CURRENT
    return learning.tuned(step.models, step.optimizers) or AUTO


PLUGIN = Plugin([verify])


# --- the report ---

WORDS = {
    "same": "same loss curve as the baseline",
    "different": "another loss curve than the baseline, but it does not end higher",
    "worse": "the loss ends above the baseline's",
    "failed": "it failed",
}
TONES: dict[str, elements.Tone] = {"same": "good", "different": "plain", "worse": "bad"}
ALLOWED = "allowed: the largest of twice that, 1 % of the loss's range, and rounding"
OTHER = "a baseline with another seed, and weights changed by about one rounding"
DISTANCE = ("distance from the baseline's losses", "root mean square")


def verification_report(result: Verification) -> Document:
    """Return the report on a verification: the verdict, distances and curves, or the failure."""
    headline = f"{result.subject}: " if result.subject else ""
    headline += f"{result.name}: {WORDS[result.verdict]}"
    if runs := next(iter(result.runs), []):
        headline += f" over {count(len(runs), 'call')} of the step"
    if result.failure:
        return Document(headline, [result.failure], result.to_dict())
    curves = [body for curve in result.curves for body in _curve(result, curve)]
    return Document(headline, [*curves, elements.AS_BEFORE], result.to_dict())


def _curve(result: Verification, curve: Curve) -> list[Any]:
    """Return the name of a loss, a table of distances, and a plot if the plan has losses."""
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
    png = lambda: rendering.as_png(loss_curves(curve, result.name))  # noqa: E731
    picture = elements.Picture(png, f"The curves of {curve.what}")
    return [*content, picture]


def loss_curves(curve: Curve, name: str) -> Figure:
    """Return a figure of the losses: baseline, plan (`name`), farthest other baseline."""
    axes = rendering.axes_of(3.2, "call of the step")
    curves: tuple[tuple[list[float], str, Any], ...] = (
        (curve.other, "another baseline", {"color": rendering.NEUTRAL, "linestyle": ":"}),
        (curve.baseline, "baseline", {"color": rendering.NEUTRAL, "linewidth": 2.5}),
        (curve.planned, name, {"color": rendering.PLANNED, "linestyle": "--"}),
    )
    for losses, label, style in curves:
        axes.plot(range(1, len(losses) + 1), losses, label=label, **style)
    axes.set_ylabel("loss", color=rendering.NEUTRAL)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, labelcolor=rendering.NEUTRAL)
    return axes.figure  # type: ignore[no-any-return]
