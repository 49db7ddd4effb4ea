"""The part of a profile's report on modules and operators."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

from speedkit_jupyter.profiling.costs import Cost, Costs
from speedkit_jupyter.profiling.profile import Profile
from speedkit_jupyter.report import plots
from speedkit_jupyter.report.elements import Folded, Picture, Row, Section, Table
from speedkit_jupyter.report.units import operations, seconds, size
from speedkit_jupyter.support.words import share

# So many are listed, and none that takes less of the step.
MOST, LEAST = 8, 0.01
LIMIT = "of limit"
# torch's range around the draw of a batch.
LOADER = "enumerate(DataLoader)"


def sections(profile: Profile) -> Iterator[Section]:
    """Tables of modules and operators, the tree of modules, and what the words mean."""
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
    yield Section(Folded("\n".join(_notes(costs))))


def roots(costs: Costs) -> dict[str, float]:
    """The outermost modules with their shares, all inside of them included."""
    return {name: part for name, part in costs.tree.items() if "." not in name}


def _listed(costs: Sequence[Cost]) -> list[Cost]:
    return [cost for cost in costs[:MOST] if cost.share >= LEAST]


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


def _notes(costs: Costs) -> Iterator[str]:
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
