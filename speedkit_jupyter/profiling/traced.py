"""What takes how long by torch's own profiler: each operator, in which module, in which pass."""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.measure.checks import torch_profiler
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.profiling.module_calls import ModuleCalls
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.torch_private import is_profiled

if TYPE_CHECKING:
    import torch

# In the names of torch's events: a module that is called, a node of the backward pass.
MODULE, NODE = "module: ", "autograd::engine::evaluate_function: "
# Python and what of torch is no operator, between the events.
PYTHON = "Python"
MICRO = 1e-6
IN_USE = "torch's profiler is at work in this code already, and there can be only one"


class Place(NamedTuple):
    """An operator, the module that it works for (empty outside of all), and in which pass."""

    module: str
    is_backward: bool
    operator: str


@dataclass
class Trace:
    """Seconds of each place in `total_s` of `calls`, and how often each event was seen.

    On a device the seconds are those of its kernels, and `busy_s` those in which it worked at all.
    `chrome` is the last call for chrome://tracing and Perfetto, as gzipped JSON.
    """

    total_s: float = 0.0
    calls: int = 0
    seconds: defaultdict[Place, float] = field(default_factory=lambda: defaultdict(float))
    times: Counter[str] = field(default_factory=Counter)
    busy_s: float | None = None
    chrome: bytes = field(default=b"", repr=False)

    def add(
        self,
        call: Callable[[], object],
        modules: ModuleCalls,
        device: torch.device,
        operators: Collection[str],
    ) -> None:
        """Trace one more call. An event within one of `operators` is part of that operator.

        Raises StepError beside another profiler.
        """
        from torch.profiler import record_function

        if is_profiled():
            raise StepError(IN_USE)
        session = torch_profiler.Session()
        with session.running(), modules.followed(lambda name: record_function(MODULE + name)):
            begun_s = clock.now()
            call()
            synchronize(device)
            total_s = clock.now() - begun_s
        if not session.was_alone:
            raise StepError(IN_USE)
        events = [one for one in session.trace.events() or () if one.name != torch_profiler.BEGINS]
        on_device = device.type != "cpu"
        found = defaultdict[Place, float](float)
        for event, place in _placed(events, modules, operators):
            found[place] += MICRO * _own_us(event, on_device)
            if event.name == place.operator or event.name.startswith(MODULE):
                self.times[event.name] += 1
        if not on_device:
            found[Place("", False, PYTHON)] += max(total_s - sum(found.values()), 0.0)
        else:
            self.busy_s = (self.busy_s or 0.0) + _busy_s(events)
        for place, spent_s in found.items():
            self.seconds[place] += spent_s
        self.total_s += total_s
        self.calls += 1
        self.chrome = _as_chrome(session.trace)


def _as_chrome(trace: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json.gz"
        trace.export_chrome_trace(str(file))
        return file.read_bytes()


def _placed(
    events: Iterable[Any], modules: ModuleCalls, operators: Collection[str]
) -> Iterator[tuple[Any, Place]]:
    """Yield each event of the processor's with its place; those around it come before it."""
    known: dict[int, Place] = {}

    def place(event: Any) -> Place:
        outer = event.cpu_parent
        around = known[id(outer)] if outer is not None else Place("", False, PYTHON)
        if event.name.startswith(MODULE):
            return around._replace(module=event.name.removeprefix(MODULE), operator=PYTHON)
        if event.name.startswith(NODE):
            module = around.module or modules.of_node(event.sequence_nr)
            return Place(module, True, "autograd")
        if around.operator in operators:
            return around
        return around._replace(operator=event.name)

    for event in events:
        if event.device_type.name != "CPU" or event.is_async:
            continue
        waiting = []  # torch lists an event before what is around it where both begin at once
        while event is not None and id(event) not in known:
            waiting.append(event)
            event = event.cpu_parent
        for one in reversed(waiting):
            known[id(one)] = place(one)
            yield one, known[id(one)]


def _own_us(event: Any, on_device: bool) -> float:
    return float(event.self_device_time_total if on_device else event.self_cpu_time_total)


def _busy_s(events: Iterable[Any]) -> float:
    """Return seconds in which any kernel ran: of those that overlap each moment once."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name != "CPU" and not event.is_user_annotation
    )
    busy, until = 0.0, float("-inf")
    for start, end in spans:
        busy += max(end - max(start, until), 0.0)
        until = max(until, end)
    return MICRO * busy
