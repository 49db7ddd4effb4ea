"""What modules and operators cost: time by torch's profiler, work by its counters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from speedkit_jupyter.machines.fp32_precision import MATMUL_PRECISION, read
from speedkit_jupyter.measure.checks import roofline
from speedkit_jupyter.measure.rounds.budget import Budget
from speedkit_jupyter.profiling.counted import Work, counted
from speedkit_jupyter.profiling.module_calls import ModuleCalls
from speedkit_jupyter.profiling.traced import MODULE, Place, Trace

if TYPE_CHECKING:
    import torch

Bound = Literal["compute", "memory", ""]
# The rate of a large copy is measured to about a tenth.
CACHED = 1.1
# As many calls are traced at most; the next one is begun where this many calls' time is left.
MOST_TRACED, ROOM = 5, 4


@dataclass(frozen=True)
class Cost:
    """What one module, or one operator, takes of a call.

    `share` is that of all the time, 0 to 1, `backward` how much of it is the backward pass.
    `times`, `flops` and `moved_bytes` are of one call; `limit` is how much of the time the machine
    needs at best (1 is as fast as it can get), and None where that is not known; `bound` is what
    that limit is made of for the most part, operations or bytes.
    """

    name: str
    kind: str
    share: float
    backward: float
    times: float
    flops: int
    moved_bytes: int
    limit: float | None
    bound: Bound

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@dataclass
class Costs:
    """Modules without those inside of them, and operators, costliest first.

    `tree` are shares of the modules with all that is inside of them, by name, in the order of the
    model; `busy` is the share of time in which a device worked at all, None on a CPU. `chrome` is
    the trace as gzipped JSON.
    """

    modules: list[Cost] = field(default_factory=list)
    operators: list[Cost] = field(default_factory=list)
    tree: Mapping[str, float] = field(default_factory=dict)
    busy: float | None = None
    chrome: bytes = field(default=b"", repr=False)


class Costing:
    """`call` makes the step once, `settle` puts it back to where it began; `names` are those of
    modules by their ids, `kinds` their classes by these names, in the order of the model.
    """

    def __init__(
        self,
        call: Callable[[], object],
        settle: Callable[[], object],
        device: torch.device,
        names: Mapping[int, str],
        kinds: Mapping[str, str],
    ) -> None:
        self._call, self._settle, self._device = call, settle, device
        self._modules, self._kinds = ModuleCalls(names), kinds

    def found(self, call_s: float, budget: Budget) -> Costs:
        """Count one call, then trace as many as the budget allows, at least one.

        `call_s` are the seconds of a plain one. Raises StepError beside another profiler.
        """
        __tracebackhide__ = True
        work, trace = Counter[Work](), Trace()
        with suppress(Exception):  # some code does not allow the dispatch mode that counts
            self._settle()
            work = counted(self._call, self._modules)
        operators = {one.place.operator for one in work}
        while trace.calls < MOST_TRACED and (not trace.calls or budget.allows(ROOM * call_s)):
            self._settle()
            trace.add(self._call, self._modules, self._device, operators)
        return costs(trace, work, self._kinds, self._device, call_s)


def costs(
    trace: Trace,
    work: Counter[Work],
    kinds: Mapping[str, str],
    device: torch.device,
    call_s: float,
) -> Costs:
    """Return all that a trace and a count say. The machine's limits are measured here, for each
    dtype once in a session.
    """
    limits, calls = _limits_s(work, device), max(trace.calls, 1)
    called = Counter[str]()
    for one, times in work.items():
        called[one.place.operator] += times

    def collected(key: Callable[[Place], str], times: Callable[[str], float]) -> list[Cost]:
        shares, done = _shares(key, trace), _Done.by(key, work, limits)
        backward = _shares(lambda place: key(place) if place.is_backward else "", trace)
        found = []
        for name in filter(None, shares):
            share, its = shares[name], done.get(name, _Done())
            limit, bound = its.limit(share * call_s)
            found.append(
                Cost(
                    name,
                    kinds.get(name, ""),
                    share,
                    backward.get(name, 0.0),
                    times(name),
                    its.flops,
                    its.moved_bytes,
                    limit,
                    bound,
                )
            )
        return sorted(found, key=lambda cost: -cost.share)

    return Costs(
        collected(lambda place: place.module, lambda name: trace.times[MODULE + name] / calls),
        collected(
            lambda place: place.operator, lambda name: called[name] or trace.times[name] / calls
        ),
        _tree(_shares(lambda place: place.module, trace), kinds),
        None if trace.busy_s is None else trace.busy_s / trace.total_s,
        trace.chrome,
    )


def _shares(key: Callable[[Place], str], trace: Trace) -> dict[str, float]:
    found = defaultdict[str, float](float)
    for place, spent_s in trace.seconds.items():
        found[key(place)] += spent_s / trace.total_s
    return found


def _tree(own: Mapping[str, float], kinds: Mapping[str, str]) -> dict[str, float]:
    """Return shares with those inside: `net` has what `net` and `net.blocks.3` have."""
    found = dict.fromkeys(kinds, 0.0)
    for name, share in own.items():
        parts = name.split(".") if name else []
        for end in range(len(parts)):
            around = ".".join(parts[: end + 1])
            found[around] = found.get(around, 0.0) + share
    return {name: share for name, share in found.items() if share > 0}


@dataclass
class _Done:
    """Work that was counted, summed: seconds at best for its operations, and for both."""

    flops: int = 0
    moved_bytes: int = 0
    computing_s: float = 0.0
    roof_s: float = 0.0

    @staticmethod
    def by(
        key: Callable[[Place], str],
        work: Counter[Work],
        limits: Mapping[Work, tuple[float, float]],
    ) -> dict[str, _Done]:
        found = defaultdict[str, _Done](_Done)
        for one, times in work.items():
            done, (computing_s, moving_s) = found[key(one.place)], limits[one]
            done.flops += times * one.flops
            done.moved_bytes += times * one.moved_bytes
            done.computing_s += times * computing_s
            # of each call what takes longer: the other happens meanwhile
            done.roof_s += times * max(computing_s, moving_s)
        return found

    def limit(self, spent_s: float) -> tuple[float | None, Bound]:
        """Return how much of the time the machine needs at best, and what for.

        What is faster than its bytes can come from memory has them from a cache: then operations
        alone are a limit.
        """
        from_memory = self.roof_s <= CACHED * spent_s
        limit_s = self.roof_s if from_memory else self.computing_s
        if not limit_s or not spent_s:
            return None, ""
        is_moving = from_memory and self.roof_s > 2 * self.computing_s
        return min(limit_s / spent_s, 1.0), "memory" if is_moving else "compute"


def _limits_s(work: Iterable[Work], device: torch.device) -> dict[Work, tuple[float, float]]:
    """Return seconds for the operations and for the bytes of each, at the machine's own rates."""
    import torch

    precision = str(read()[MATMUL_PRECISION])
    setting = "fp32" if precision == "highest" else precision
    peaks: dict[Any, roofline.Peak] = {}
    found = {}
    for one in work:
        dtype = one.dtype if one.flops and one.dtype is not None else torch.float32
        if dtype not in peaks:
            peaks[dtype] = roofline.peak(device, dtype, setting)
        found[one] = (
            one.flops / peaks[dtype].flops_per_s, one.moved_bytes / peaks[dtype].bytes_per_s
        )  # fmt: skip
    return found
