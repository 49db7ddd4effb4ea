"""Reports about tuning, learned plans, compiled code and loss curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines import compile_cache
from speedkit_jupyter.report import elements, rendering
from speedkit_jupyter.report.comparison_report import describe_gain, latency_lines
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.rounds.statistics import INTERVAL
from speedkit_jupyter.search import learning
from speedkit_jupyter.search.outcome import Tuning
from speedkit_jupyter.search.verification import Curve, Verification
from speedkit_jupyter.support.database import Kept
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.units import between, count, day, ratio, seconds, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("part", "adds", INTERVAL)
PLANS = ("plan", "speed-up", "verdict")
# Number of plans in the table; other plans are folded.
MOST_SHOWN = 5


def tuning_report(tuning: Tuning) -> Document:
    """Return the answer, the tried plans and the next commands; the rest is folded."""
    parts = [(name, ratio(r.median), between(r.low, r.high)) for name, r in tuning.parts()]
    plans = _plans(tuning)
    apply, *others = _next_steps(tuning) or [""]
    kept = [f"Left as they are: {', '.join(tuning.kept)}."] if tuning.kept else []
    told = tuning.comparison or next((one.comparison for one in reversed(tuning.stages)), None)
    latency = latency_lines(told, {"baseline", tuning.winner.name, tuning.likely}) if told else ()
    content = [
        elements.Table(PLANS, plans[:MOST_SHOWN], wraps=PLANS[:1]),
        "\n".join(latency),
        elements.CodeBlock(apply),
        elements.Section(elements.CodeBlock("\n".join(others)), "Then", folded=True),
        elements.Section(
            elements.Table(PARTS, parts if tuning.helped else (), PARTS[1:]),
            "Each part",
            folded=True,
        ),
        elements.Section(
            elements.Table(PLANS, plans[MOST_SHOWN:], wraps=PLANS[:1]), folded=True, noun="plan"
        ),
        elements.Section(
            "\n".join([*kept, *tuning.notes, elements.AS_BEFORE]), "Notes", folded=True
        ),
    ]
    return Document(f"{elements.banner(tuning.busy)}{_answer(tuning)}", content, tuning.to_dict())


def _plans(tuning: Tuning) -> list[elements.Row]:
    """Return the plans with speed-up and verdict: the answer first, then by speed-up."""
    likely = {tuning.likely: "likely, not proven"} if tuning.likely else {}
    answer = {tuning.winner.name: f"proven{tuning.where}"} if tuning.helped else likely
    verdicts = dict(tuning.rejected)
    speedups, medians, ranks = {}, {"baseline": 1.0}, dict.fromkeys(answer, -math.inf)
    for row in tuning.tried.rows():
        name, found = row.record.name, row.comparison.ratio(row.record)
        found = tuning.ratio if name == tuning.winner.name else found
        why = row.why_not(next(iter(answer), "another plan"))
        if found is not None:
            speedups[name] = elements.BLANK if row.is_vague else str(found)
            medians[name] = 0.0 if row.is_vague else found.median
            ranks.setdefault(name, -found.median)
            # The reason may be from an earlier race, with an outdated number.
            verdicts[name] = why.replace(f": {found}", "")
        verdicts.setdefault(name, why)
    verdicts |= answer
    most = max(medians.values())
    rows = []
    for name in sorted(verdicts, key=lambda name: ranks.get(name, math.inf)):
        speedup = elements.TableCell(
            speedups.get(name, elements.BLANK), share=medians.get(name, 0.0) / most
        )
        tone: elements.Tone = "good" if name in answer else "plain"
        rows.append(elements.Row((name, speedup, verdicts[name]), tone))
    return rows


def _next_steps(tuning: Tuning) -> list[str]:
    """Return the magics to run next, with the model's name if there are several models."""
    models, code = ",".join(tuning.named), [f"code {name}" for name in tuning.named or ("",)]
    lines = {
        f"apply {models}": "applies the plan; with -v NAME, NAME.apply() too",
        "verify": "compares loss curves with and without the plan",
    } | dict.fromkeys(code, "the plan as plain PyTorch code")
    if not tuning.helped:
        told = "# with -v found: applies the likely plan, although it is not proven"
        return [f"found.apply(likely=True)  {told}"] * bool(tuning.likely)
    width = max(map(len, map(str.strip, lines)))
    return [f"%speedkit {one.strip():{width}}  # {about}" for one, about in lines.items()]


def _answer(tuning: Tuning) -> str:
    took = f"in {seconds(tuning.seconds)}" if tuning.seconds else "interrupted"
    if tuning.seconds and tuning.compiling_s >= 0.5:  # less is not worth mentioning
        took += f", {seconds(tuning.compiling_s)} of them compiling"
    if not tuning.helped and tuning.unclear:
        return f"{'Likely' if tuning.likely else 'Could not decide'}: {tuning.unclear} ({took})"
    if (proven := tuning.ratio) is None:
        most = tuning.most
        nothing = f"no plan is more than {ratio(most)} as fast" if most else "no plan was timed"
        return f"Nothing to gain: {nothing} ({took})"
    gain = f"is {describe_gain(proven, 'baseline')}"
    return f"{tuning.winner.name} {gain}, confirmed in fresh rounds{tuning.where} ({took})"


# --- the store ---

LEARNED = ("number", "plan", "speed-up", "model and machine", "inputs", "learned")


def tuned_list(plans: Sequence[Kept]) -> Document:
    if not plans:
        return Document("Nothing learned yet: `%%speedbench --tune` finds a plan and stores it")
    note = "`%speedkit apply` uses the newest that fits; `%speedkit tuned forget NUMBER` drops one."
    rows = [_learned(one) for one in reversed(plans)]
    table = elements.Table(LEARNED, rows, LEARNED[:1], LEARNED[1:5])
    return Document(count(len(plans), "learned plan"), [table, note])


def _learned(entry: Kept) -> tuple[str, ...]:
    plan = entry.value
    gain = learning.gain(plan)
    work = "training" if plan["trains"] else "inference"
    subject = f"{plan['model']}, {plan['parameters']:,} parameters, {work}; {plan['device']}"
    name = plan["name"] if plan["values"] else "leave it as it is"
    if not learning.is_usable(entry):
        name += f" (of {'an earlier' if entry.is_earlier else 'another'} version, not used)"
    inputs = ", ".join(plan["inputs"]) or "not seen"
    return str(entry.number), name, gain or elements.BLANK, subject, inputs, day(entry.saved_at)


def cache_report() -> Document:
    """Return the folder and the size of compiled code, or the reason why it is not used."""
    try:
        folder, used = compile_cache.trusted().parent, size(compile_cache.size_bytes())
    except SpeedKitError as error:
        return Document(f"Compiled code is neither saved nor loaded: {error}")
    limit = f"Code beyond {size(compile_cache.MOST_BYTES)} is deleted."
    return Document(f"Compiled code in {folder}: {used}", [limit])


# --- the verification: loss curves ---

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
    png = lambda: rendering.as_png(loss_curves(curve, result.name))  # noqa: E731
    picture = elements.Picture(png, f"The curves of {curve.what}")
    return [*content, picture]


def loss_curves(curve: Curve, name: str) -> Figure:
    """Return a figure of the losses of baseline, plan (`name`) and a second baseline."""
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
