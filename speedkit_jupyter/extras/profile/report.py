"""The report of a profile: parts of a step, lines that wait, modules, operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from speedkit_jupyter.extras.profile.costs import Cost
from speedkit_jupyter.extras.profile.profile import Profile
from speedkit_jupyter.extras.profile.split import PARTS, Part
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Section, Table, TableCell, banner
from speedkit_jupyter.rounds.presentable import report_of
from speedkit_jupyter.support.source_lines import source
from speedkit_jupyter.support.units import count, operations, seconds, share, size

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
# Characters of a bar for the whole step.
WIDTH = 24
# Shares of the step below which a part, a line, and a module or an operator are no row.
LEAST_PART, LEAST_LINE, LEAST_COST = 0.0005, 0.02, 0.01
# Rows of a table.
MOST = 8
# A profiled call that takes this many times as long is named.
DEAR = 1.1
TIME = ("of a step", "share")
NUMBERS = ("times a step", *TIME, "backward", "operations", "moves")
MODULES = ("module", "class", *TIME, "backward", "operations", "of limit")
OPERATORS = ("operator", "times a step", *TIME, "operations", "moves", "of limit")
# Columns that leave a narrow text, the last of them first.
LEAVING = ("times a step", "backward", "class")
# torch's range around the draw of a batch.
LOADER = "enumerate(DataLoader)"
NOTES = """\
Modules and operators are timed by torch's profiler, in calls of their own, which it slows down; a \
backward pass counts for its module.
Operations: products, convolutions and attention; moves: bytes that are read and written. Of \
limit: the time that these need at this machine's rates, over the time that was taken."""


@report_of.register
def profile_report(profile: Profile) -> Document:
    """Return the parts in the order of a step, then lines, modules and operators."""
    if not profile.taken:
        return Document("Nothing was profiled")
    shares = {part: profile.share(part) for part in PARTS}
    rows = [
        (part, seconds(profile.seconds(part)), share(of), "█" * round(of * WIDTH), ABOUT[part])
        for part, of in shares.items()
        if of >= LEAST_PART or part == "rest"
    ]
    content = [
        Table(("part", *TIME, "", "what it is"), rows, TIME, optional=("what it is",)),
        Section(_waits(profile), "Synchronizations"),
        Section(_lines(profile), "Lines of your code, each without the lines that it calls"),
        *_costs(profile),
        "\n".join(_notes(profile)),
    ]
    first, second = sorted(PARTS, key=profile.share, reverse=True)[:2]
    of_a_call = f" ({profile.steps} in a call)" if profile.steps > 1 else ""
    most = f"{share(shares[first])} {first}, {share(shares[second])} {second}"
    headline = f"{seconds(profile.step_s)} a step{of_a_call}: {most}"
    return Document(f"{banner(profile.load)}{headline}", content, profile.to_dict())


def _waits(profile: Profile) -> Table:
    rows = []
    for wait in profile.waits()[:MOST]:
        line = source(wait.line.file, wait.line.number) or wait.line.call
        times, took = f"{wait.times:.3g}", seconds(wait.seconds)
        rows.append((profile.place(wait.line), times, took, TableCell(line, code=True)))
    return Table(("where", "times a step", "of a step", "line"), rows, NUMBERS)


def _lines(profile: Profile) -> Table:
    rows = []
    for spot, part in profile.lines.costliest()[:MOST]:
        if part >= LEAST_LINE:
            line = TableCell(source(spot.file, spot.number), code=True)
            took, mostly = seconds(part * profile.step_s), profile.lines.part(spot)
            rows.append((profile.place(spot), took, share(part), mostly, line))
    return Table(("where", *TIME, "mostly", "line"), rows, NUMBERS)


def _notes(profile: Profile) -> Iterator[str]:
    waits = profile.waits()
    if len(waits) > MOST:
        yield f"{len(waits) - MOST} more lines wait, each for less."
    if waits and profile.device == "cpu":
        yield "On a CPU these lines wait for nothing; on a GPU each one waits until it is idle."
    if profile.is_interrupted:
        yield "Interrupted: what was found until then."
    calls = count(len(profile.taken), "profiled call")
    if profile.cost is None:
        if not profile.is_interrupted:
            yield f"{calls}: the first one took too long for a second."
        return
    yield f"{calls}, each of them {profile.cost:.2f} times as long as a plain one in between."
    if profile.cost > DEAR:
        yield "Seconds are those of the plain calls; the shares of such short parts are rough."
    if profile.first is not None and (compiling_s := profile.first.seconds["compiling"]) > 0:
        yield f"Before, the first call compiled for {seconds(compiling_s)}."


def _costs(profile: Profile) -> list[Any]:
    costs = profile.costs
    if costs is None:
        why = profile.why_no_costs
        return [f"Modules and operators: {why}." if why else ""]
    outermost = [name for name in costs.tree if "." not in name]
    inclusive = ", ".join(f"{name} {share(costs.tree[name])}" for name in outermost)
    # A module is called by the path inside the model, where there is one model with parts.
    is_one = sum(any(n.startswith(f"{root}.") for n in costs.tree) for root in outermost) == 1
    modules = [(is_one and cost.name.partition(".")[2]) or cost.name for cost in costs.modules]
    # `addmm` for `aten::addmm`, `AdamW.step` for torch's own range around it.
    operators = [
        "DataLoader" if name.startswith(LOADER) else name.rpartition("#")[2].removeprefix("aten::")
        for name in (cost.name for cost in costs.operators)
    ]
    busy = ""
    if costs.busy is not None:
        busy = f"The device was busy {share(costs.busy)} of the time, and idle for the rest."
    table = _cost_table(profile, MODULES, modules, costs.modules)
    return [
        Section(table, "Modules, each without those inside of it"),
        f"With all inside of them: {inclusive}." if table else "",
        Section(_cost_table(profile, OPERATORS, operators, costs.operators), "Operators"),
        busy,
        Section(NOTES, folded=True),
    ]


def _cost_table(
    profile: Profile, columns: tuple[str, ...], names: Sequence[str], costs: Sequence[Cost]
) -> Table:
    rows, steps = [], profile.steps
    for name, cost in zip(names[:MOST], costs, strict=False):
        if cost.share < LEAST_COST:
            continue
        limit = "" if cost.limit is None else f"{share(cost.limit)} {cost.bound}"
        cells = {
            columns[0]: name,
            "class": cost.kind,
            "times a step": f"{cost.times / steps:.3g}" if cost.times else "",
            "of a step": seconds(cost.share * profile.step_s),
            "share": share(cost.share),
            "backward": share(cost.backward / cost.share),
            "operations": operations(cost.flops / steps) if cost.flops else "",
            "moves": size(cost.moved_bytes / steps) if cost.moved_bytes else "",
            # In a narrow page it is the last column, and no line breaks in it.
            "of limit": limit.replace(" ", "\u00a0"),
        }
        rows.append(tuple(cells[title] for title in columns))
    optional = tuple(title for title in LEAVING if title in columns)
    return Table(columns, rows, NUMBERS, columns[:1], optional)
