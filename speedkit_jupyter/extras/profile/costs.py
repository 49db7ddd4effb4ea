"""What modules and operators cost: time by torch's profiler, work by its counters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import Literal

import torch

from speedkit_jupyter.extras.profile.operators import (
    MODULE,
    ModuleCalls,
    OperatorCall,
    Trace,
    counted,
)
from speedkit_jupyter.machines.fp32_precision import MATMUL_PRECISION, read
from speedkit_jupyter.rounds import roofline
from speedkit_jupyter.rounds.budget import Budget

Bound = Literal["compute", "memory", ""]
# The rate of a large copy is measured to about a tenth.
CACHED = 1.1
# As many calls are traced at most; the next one is begun where this many calls' time is left.
MOST_TRACED, ROOM = 5, 4


@dataclass
class Cost:
    """What one module, or one operator, takes of a call.

    `share` is of all the time, 0 to 1, `backward` the part of it in the backward pass; `times`,
    `flops` and `moved_bytes` are of one call. `limit` is how much of the time the machine needs at
    best (None: unknown), `bound` what that is made of: operations or bytes.
    """

    name: str
    kind: str = ""
    share: float = 0.0
    backward: float = 0.0
    times: float = 0.0
    flops: int = 0
    moved_bytes: int = 0
    limit: float | None = None
    bound: Bound = ""


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
    (by_id, kinds), work, trace = names, Counter[OperatorCall](), Trace()
    modules = ModuleCalls(by_id)
    with suppress(Exception):  # some code does not allow the dispatch mode that counts
        settle()
        work = counted(call, modules)
    operators = {one.place.operator for one in work}
    while trace.calls < MOST_TRACED and (not trace.calls or budget.allows(ROOM * call_s)):
        settle()
        trace.add(call, modules, device, operators)
    limits = _limits_s(work, device)
    by_module = _collected("module", trace, work, limits, call_s)
    by_operator = _collected("operator", trace, work, limits, call_s)
    for one in by_module:
        one.kind, one.times = kinds.get(one.name, ""), trace.times[MODULE + one.name] / trace.calls
    for one in by_operator:
        one.times = one.times or trace.times[one.name] / trace.calls
    busy = None if trace.busy_s is None else trace.busy_s / trace.total_s
    return Costs(by_module, by_operator, _tree(by_module, kinds), busy)


def _collected(
    key: str,
    trace: Trace,
    work: Counter[OperatorCall],
    limits: Mapping[OperatorCall, tuple[float, float]],
    call_s: float,
) -> list[Cost]:
    """Return the costs by the attribute `key` of the places, the costliest first."""
    found, name = dict[str, Cost](), attrgetter(key)
    for place, spent_s in trace.seconds.items():
        cost, share = found.setdefault(name(place), Cost(name(place))), spent_s / trace.total_s
        cost.share += share
        cost.backward += share * place.is_backward
    computing_s, roof_s = defaultdict[str, float](float), defaultdict[str, float](float)
    for done, times in work.items():
        if (at := name(done.place)) in found:
            found[at].times += times
            found[at].flops += times * done.flops
            found[at].moved_bytes += times * done.moved_bytes
            computing_s[at] += times * limits[done][0]
            # The shorter of the two happens meanwhile.
            roof_s[at] += times * max(limits[done])
    found.pop("", None)
    for at, cost in found.items():
        cost.limit, cost.bound = _limit(computing_s[at], roof_s[at], cost.share * call_s)
    return sorted(found.values(), key=lambda cost: -cost.share)


def _limit(computing_s: float, roof_s: float, spent_s: float) -> tuple[float | None, Bound]:
    """Return how much of the time the machine needs at best, and what for.

    What is faster than memory has its bytes from a cache: then operations alone are a limit.
    """
    from_memory = roof_s <= CACHED * spent_s
    limit_s = roof_s if from_memory else computing_s
    if not limit_s or not spent_s:
        return None, ""
    is_moving = from_memory and roof_s > 2 * computing_s
    return min(limit_s / spent_s, 1.0), "memory" if is_moving else "compute"


def _tree(modules: Iterable[Cost], kinds: Mapping[str, str]) -> dict[str, float]:
    """Return shares with those inside: `net` has what `net` and `net.blocks.3` have."""
    found = dict.fromkeys(kinds, 0.0)
    for cost in modules:
        for around in accumulate(cost.name.split("."), "{}.{}".format):
            found[around] = found.get(around, 0.0) + cost.share
    return {name: share for name, share in found.items() if share > 0}


def _limits_s(
    work: Iterable[OperatorCall], device: torch.device
) -> dict[OperatorCall, tuple[float, float]]:
    """Return seconds for the operations and the bytes of each, at the machine's own rates."""
    precision = str(read()[MATMUL_PRECISION])
    setting = "fp32" if precision == "highest" else precision
    found = {}
    for one in work:
        dtype = one.dtype if one.flops and one.dtype is not None else torch.float32
        peak = roofline.peak(device, dtype, setting)
        found[one] = one.flops / peak.flops_per_s, one.moved_bytes / peak.bytes_per_s
    return found
