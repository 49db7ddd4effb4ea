"""Reports about tuning, learned plans and stored compiled code."""

from __future__ import annotations

import math
from collections.abc import Sequence

from speedkit_jupyter.machines import compile_cache
from speedkit_jupyter.report import elements
from speedkit_jupyter.report.comparison_report import describe_gain, latency_lines
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.rounds.statistics import INTERVAL
from speedkit_jupyter.search import learning
from speedkit_jupyter.search.outcome import Tuning
from speedkit_jupyter.support.database import Kept
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.units import between, count, day, ratio, seconds, size

PARTS = ("part", "adds", INTERVAL)
PLANS = ("plan", "speed-up", "verdict")
# Maximum number of plans in the first table; the other plans are folded.
MOST_SHOWN = 5


def tuning_report(tuning: Tuning) -> Document:
    """Return a search's report: the answer, the best plans and the next command; fold the rest."""
    parts = [(name, ratio(r.median), between(r.low, r.high)) for name, r in tuning.parts()]
    plans = _plans(tuning)
    apply, *others = _next_steps(tuning) or [""]
    kept = [f"Left as they are: {', '.join(tuning.kept)}."] if tuning.kept else []
    told = tuning.comparison or next((one.comparison for one in reversed(tuning.stages)), None)
    latency = latency_lines(told, {"baseline", tuning.winner.name, tuning.likely}) if told else ()
    first = elements.Table(PLANS, plans[:MOST_SHOWN], wraps=PLANS[:1])
    rest = elements.Table(PLANS, plans[MOST_SHOWN:], wraps=PLANS[:1])
    adds = elements.Table(PARTS, parts if tuning.helped else (), PARTS[1:])
    notes = "\n".join([*kept, *tuning.notes, elements.AS_BEFORE])
    content = [
        first,
        "\n".join(latency),
        elements.CodeBlock(apply),
        elements.Section(elements.CodeBlock("\n".join(others)), "Then", folded=True),
        elements.Section(adds, "Each part", folded=True),
        elements.Section(rest, folded=True, noun="plan"),
        elements.Section(notes, "Notes", folded=True),
    ]
    return Document(f"{elements.banner(tuning.busy)}{_answer(tuning)}", content, tuning.to_dict())


def _plans(tuning: Tuning) -> list[elements.Row]:
    """Return a row per plan: the proven or likely plan first, then the others by speed-up."""
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
            # The reason in `rejected` may quote an outdated number of an earlier race.
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
    """Return the next commands for a proven or likely plan; an empty list without such a plan."""
    models, code = ",".join(tuning.named), [f"code {name}" for name in tuning.named or ("",)]
    lines = {
        f"apply {models}": "applies the plan; with -v NAME, NAME.apply() too",
        "verify": "compares loss curves with and without the plan",
    } | dict.fromkeys(code, "the plan as plain PyTorch code")
    if not tuning.helped:
        likely = f"%speedkit {f'apply {models}'.strip()} --likely"
        return [f"{likely}  # although it is not proven"] * bool(tuning.likely)
    width = max(map(len, map(str.strip, lines)))
    return [f"%speedkit {one.strip():{width}}  # {about}" for one, about in lines.items()]


def _answer(tuning: Tuning) -> str:
    """Return the headline: the winner's gain or why no plan won, and the time of the search."""
    took = f"in {seconds(tuning.seconds)}" if tuning.seconds else "interrupted"
    if tuning.seconds and tuning.compiling_s >= 0.5:  # a shorter time is not worth mentioning
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
    """Return a report of the compiled code's folder and size, or why no code is stored."""
    try:
        folder, used = compile_cache.trusted().parent, size(compile_cache.size_bytes())
    except SpeedKitError as error:
        return Document(f"Compiled code is neither saved nor loaded: {error}")
    limit = f"Above {size(compile_cache.MOST_CACHE_BYTES)} all code is deleted."
    return Document(f"Compiled code in {folder}: {used}", [limit])
