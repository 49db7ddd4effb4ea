"""What modules and operators cost: time by torch's profiler, work by its counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter

import torch

from speedkit_jupyter.measure.rounds.budget import Budget
from speedkit_jupyter.profiling.operators import MODULE, ModuleCalls, Trace, Work, counted

# As many calls are traced at most; the next one is begun where this many calls' time is left.
MOST_TRACED, ROOM = 5, 4


@dataclass
class Cost:
    """What one module, or one operator, takes of a call.

    `share` is of all the time, 0 to 1, `backward` the part of it in the backward pass; `times`,
    `flops` and `moved_bytes` are of one call.
    """

    name: str
    kind: str = ""
    share: float = 0.0
    backward: float = 0.0
    times: float = 0.0
    flops: int = 0
    moved_bytes: int = 0


@dataclass
class Costs:
    """Modules without those inside of them, and operators, costliest first.

    `tree` are shares of modules with those inside, by name, in the model's order; `busy` is the
    share of time in which a device worked, None on a CPU.
    """

    modules: list[Cost] = field(default_factory=list)
    operators: list[Cost] = field(default_factory=list)
    tree: Mapping[str, float] = field(default_factory=dict)
    busy: float | None = None


def costs_of(
    call: Callable[[], object],
    settle: Callable[[], object],
    device: torch.device,
    names: tuple[Mapping[int, str], Mapping[str, str]],
    call_s: float,
    budget: Budget,
) -> Costs:
    """Count one call, then trace as many as the budget allows, at least one.

    `call` makes the step once, in `call_s` seconds; `settle` puts it back to where it began.
    `names` are those of `names_of`. Raises StepError beside another profiler.
    """
    (by_id, kinds), work, trace = names, Counter[Work](), Trace()
    modules = ModuleCalls(by_id)
    with suppress(Exception):  # some code does not allow the dispatch mode that counts
        settle()
        work = counted(call, modules)
    operators = {one.place.operator for one in work}
    while trace.calls < MOST_TRACED and (not trace.calls or budget.allows(ROOM * call_s)):
        settle()
        trace.add(call, modules, device, operators)
    by_module, by_operator = (_collected(key, trace, work) for key in ("module", "operator"))
    for one in by_module:
        one.kind, one.times = kinds.get(one.name, ""), trace.times[MODULE + one.name] / trace.calls
    for one in by_operator:
        one.times = one.times or trace.times[one.name] / trace.calls
    busy = None if trace.busy_s is None else trace.busy_s / trace.total_s
    return Costs(by_module, by_operator, _tree(by_module, kinds), busy)


def _collected(key: str, trace: Trace, work: Counter[Work]) -> list[Cost]:
    """Return the costs by the attribute `key` of the places, the costliest first."""
    found, name = dict[str, Cost](), attrgetter(key)
    for place, spent_s in trace.seconds.items():
        cost, share = found.setdefault(name(place), Cost(name(place))), spent_s / trace.total_s
        cost.share += share
        cost.backward += share * place.is_backward
    for done, times in work.items():
        if (at := name(done.place)) in found:
            found[at].times += times
            found[at].flops += times * done.flops
            found[at].moved_bytes += times * done.moved_bytes
    found.pop("", None)
    return sorted(found.values(), key=lambda cost: -cost.share)


def _tree(modules: Iterable[Cost], kinds: Mapping[str, str]) -> dict[str, float]:
    """Return shares with those inside: `net` has what `net` and `net.blocks.3` have."""
    found = dict.fromkeys(kinds, 0.0)
    for cost in modules:
        for around in accumulate(cost.name.split("."), "{}.{}".format):
            found[around] = found.get(around, 0.0) + cost.share
    return {name: share for name, share in found.items() if share > 0}
