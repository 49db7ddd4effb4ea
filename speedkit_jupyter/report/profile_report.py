"""The report of a profile: parts of a step, lines that wait, modules and operators."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

from speedkit_jupyter.profiling.costs import Cost, Costs
from speedkit_jupyter.profiling.lines import source
from speedkit_jupyter.profiling.profile import Profile, Wait
from speedkit_jupyter.profiling.split import PARTS, Part
from speedkit_jupyter.report import plots
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Folded, Picture, Row, Section, Source, Table
from speedkit_jupyter.report.units import operations, seconds, size
from speedkit_jupyter.support.words import count, share

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
# A bar of the table has so many characters for the whole step.
WIDTH = 24
# What has less of the step is no row.
PROFILE_LEAST = 0.0005
# A profiled call that takes longer than this is said to.
DEAR = 1.1
# Lines are listed up to so many, and none that takes less of the step.
MOST_LINES, LEAST_OF_A_LINE = 8, 0.02


def profile_report(profile: Profile) -> Document:
    """Return the parts in the order of a step, then lines, modules and operators."""
    if not profile.taken:
        return Document("Nothing was profiled")
    parts = [part for part in PARTS if profile.share(part) >= PROFILE_LEAST or part == "rest"]
    rows = [
        Row((part, seconds(profile.seconds(part)), share(profile.share(part)),
             _bar(profile.share(part)), ABOUT[part]))
        for part in parts
    ]  # fmt: skip
    table = Table(
        ("part", "of a step", "share", "", "what it is"),
        tuple(rows),
        numbers=("of a step", "share"),
        optional=("what it is",),
    )
    sections = [Section(table)]
    if waits := profile.waits():
        sections.append(Section(_waits(profile, waits), "Synchronizations"))
    if lines := _lines(profile):
        sections.append(Section(lines, "Lines of your code, each without the lines that it calls"))
    sections += costs_sections(profile)
    sections.append(Section("\n".join(_profile_notes(profile))))
    return Document(_headline(profile), tuple(sections), profile.to_dict())


def _headline(profile: Profile) -> str:
    first, second = sorted(PARTS, key=profile.share, reverse=True)[:2]
    of_a_call = f" ({profile.steps} in a call)" if profile.steps > 1 else ""
    return (
        f"{seconds(profile.step_s)} a step{of_a_call}: {share(profile.share(first))} {first}, "
        f"{share(profile.share(second))} {second}"
    )


def _waits(profile: Profile, waits: list[Wait]) -> Table:
    rows = [
        Row((profile.place(wait.line), f"{wait.times:.3g}", seconds(wait.seconds),
             Source(source(wait.line.file, wait.line.number) or wait.line.call)))
        for wait in waits[:MOST_LINES]
    ]  # fmt: skip
    return Table(
        ("where", "times a step", "of a step", "line"),
        tuple(rows),
        numbers=("times a step", "of a step"),
    )


def _lines(profile: Profile) -> Table | None:
    rows = [
        Row((profile.place(spot), seconds(part * profile.step_s), share(part),
             profile.lines.part(spot), Source(source(spot.file, spot.number))))
        for spot, part in profile.lines.costliest()[:MOST_LINES]
        if part >= LEAST_OF_A_LINE
    ]  # fmt: skip
    columns = ("where", "of a step", "share", "mostly", "line")
    return Table(columns, tuple(rows), numbers=("of a step", "share")) if rows else None


def _profile_notes(profile: Profile) -> Iterator[str]:
    waits = profile.waits()
    if len(waits) > MOST_LINES:
        yield f"{len(waits) - MOST_LINES} more lines wait, each for less."
    if waits and profile.device == "cpu":
        yield "On a CPU these lines wait for nothing; on a GPU each one waits until it is idle."
    calls = count(len(profile.taken), "profiled call")
    if profile.cost is None:
        yield f"{calls}: the first one took too long for a second."
        return
    yield f"{calls}, each of them {profile.cost:.2f} times as long as a plain one in between."
    if profile.cost > DEAR:
        yield "Seconds are those of the plain calls; of so short parts the shares are rough."
    if profile.first is not None and (compiling_s := profile.first.seconds["compiling"]) > 0:
        yield f"Before, the first call compiled for {seconds(compiling_s)}."


def _bar(part: float) -> str:
    """In eighths of a character."""
    whole, eighths = divmod(int(part * WIDTH * 8 + 0.5), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths].strip()


# So many are listed, and none that takes less of the step.
MOST, COSTS_LEAST = 8, 0.01
LIMIT = "of limit"
# torch's range around the draw of a batch.
LOADER = "enumerate(DataLoader)"


def costs_sections(profile: Profile) -> Iterator[Section]:
    """Return tables of modules and operators, the tree of modules, and what the words mean."""
    costs = profile.costs
    if costs is None:
        if profile.why_no_costs:
            yield Section(f"Modules and operators: {profile.why_no_costs}.")
        return
    if modules := _listed(costs.modules):
        yield Section(_modules(profile, costs, modules), "Modules, each without those inside of it")
        spoken = ", ".join(f"{name} {share(part)}" for name, part in roots(costs).items())
        yield Section(Picture(partial(_png, costs), f"all inside of it: {spoken}"))
    if operators := _listed(costs.operators):
        yield Section(_operators(profile, operators), "Operators")
    if costs.busy is not None:
        yield Section(
            f"The device was busy {share(costs.busy)} of the time, and idle for the rest."
        )
    yield Section(Folded("\n".join(_costs_notes(costs))))


def roots(costs: Costs) -> dict[str, float]:
    """Return the outermost modules with their shares, all inside of them included."""
    return {name: part for name, part in costs.tree.items() if "." not in name}


def _listed(costs: Sequence[Cost]) -> list[Cost]:
    return [cost for cost in costs[:MOST] if cost.share >= COSTS_LEAST]


def _modules(profile: Profile, costs: Costs, listed: Sequence[Cost]) -> Table:
    models = [
        name for name in roots(costs) if any(one.startswith(f"{name}.") for one in costs.tree)
    ]
    rows = [
        Row((_within(cost.name, models), cost.kind, *_time(profile, cost),
             share(cost.backward / cost.share), _flops(profile, cost), _limit(cost)))
        for cost in listed
    ]  # fmt: skip
    return Table(
        ("module", "class", "of a step", "share", "backward", "operations", LIMIT),
        tuple(rows),
        numbers=("of a step", "share", "backward", "operations"),
        wraps=("module",),
        optional=("backward", "class"),
    )


def _operators(profile: Profile, listed: Sequence[Cost]) -> Table:
    rows = [
        Row((_spoken(cost.name), _times(profile, cost), *_time(profile, cost),
             _flops(profile, cost), _moved(profile, cost), _limit(cost)))
        for cost in listed
    ]  # fmt: skip
    return Table(
        ("operator", "times a step", "of a step", "share", "operations", "moves", LIMIT),
        tuple(rows),
        numbers=("times a step", "of a step", "share", "operations", "moves"),
        wraps=("operator",),
        optional=("times a step",),
    )


def _within(name: str, models: Collection[str]) -> str:
    """`blocks.3.mlp` where there is one model, with its name where there are several."""
    _, _, path = name.partition(".")
    return path if path and len(models) == 1 else name


def _times(profile: Profile, cost: Cost) -> str:
    return f"{cost.times / profile.steps:.3g}" if cost.times else ""


def _time(profile: Profile, cost: Cost) -> tuple[str, str]:
    return seconds(cost.share * profile.step_s), share(cost.share)


def _flops(profile: Profile, cost: Cost) -> str:
    return operations(cost.flops / profile.steps) if cost.flops else ""


def _moved(profile: Profile, cost: Cost) -> str:
    return size(cost.moved_bytes / profile.steps) if cost.moved_bytes else ""


def _limit(cost: Cost) -> str:
    """Without a place to break a line at: in a narrow page it is the last column."""
    return "" if cost.limit is None else f"{share(cost.limit)} {cost.bound}".replace(" ", "\u00a0")


def _spoken(name: str) -> str:
    """`addmm` for `aten::addmm`, `AdamW.step` for torch's own range around it."""
    if name.startswith(LOADER):
        return "DataLoader"
    _, _, called = name.rpartition("#")
    return called.removeprefix("aten::")


def _costs_notes(costs: Costs) -> Iterator[str]:
    yield (
        "Times of modules and operators are by torch's profiler, in calls of their own, which it "
        "makes slower where operators are small; the backward pass counts for the module whose "
        "forward pass it belongs to."
    )
    yield (
        "Operations are matrix products, convolutions and attention, by torch's counter; moves: "
        "bytes of the tensors that are read and written. Of limit: the time that these need at "
        "the machine's own rates (a large product, a large copy), over the time that was taken. "
        "Compute and memory say which of the two it is, for the most part."
    )
    yield "The trace for Perfetto: export_chrome_trace('trace.json.gz') of the result (-v NAME)."


def _png(costs: Costs) -> bytes:
    return plots.as_png(plots.tree(costs.tree))
