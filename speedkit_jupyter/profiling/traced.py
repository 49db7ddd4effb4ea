"""What takes how long by torch's own profiler: each operator, in which module, in which pass."""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.measure.checks import torch_profiler
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.profiling.module_calls import ModuleCalls
from speedkit_jupyter.support.exceptions import StepError

if TYPE_CHECKING:
    import torch

# In the names of torch's events: a module that is called, a node of the backward pass.
MODULE, NODE = "module: ", "autograd::engine::evaluate_function: "
# Python and what of torch is no operator, between the events.
PYTHON = "Python"
# No more of a long call is traced: its events would fill the memory.
MOST_S = 3.0
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

        Of a call that is longer than MOST_S its beginning. Raises StepError beside another
        profiler.
        """
        if torch_profiler.is_in_use():
            raise StepError(IN_USE)
        recording = _Recording(device)
        with recording.running(), modules.followed(recording.around(modules)):
            call()
        if not recording.was_alone:
            raise StepError(IN_USE)
        events = [
            one for one in recording.trace.events() or () if one.name != torch_profiler.BEGINS
        ]
        on_device = device.type != "cpu"
        found = defaultdict[Place, float](float)
        for event, place in _placed(events, modules, operators):
            found[place] += MICRO * _own_us(event, on_device)
            if event.name == place.operator or event.name.startswith(MODULE):
                self.times[event.name] += 1
        if not on_device:
            found[Place("", False, PYTHON)] += max(recording.total_s - sum(found.values()), 0.0)
        else:
            self.busy_s = (self.busy_s or 0.0) + _busy_s(events)
        for place, spent_s in found.items():
            self.seconds[place] += spent_s
        self.total_s += recording.total_s
        self.calls += 1
        self.chrome = recording.chrome()


class _Recording(torch_profiler.Session):
    """torch's profiler around a call, or around its beginning."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._begun_s = device, clock.now()
        self.total_s = 0.0

    def around(self, modules: ModuleCalls) -> Callable[[str], Any]:
        """Makes the events of modules, and ends what takes long."""
        from torch.profiler import record_function

        @contextmanager
        def named(name: str) -> Iterator[None]:
            if not self.is_on:
                yield
                return
            with record_function(MODULE + name):
                yield
            if len(modules) == 1 and clock.now() - self._begun_s > MOST_S:
                self.end()

        self._begun_s = clock.now()
        return named

    def end(self) -> None:
        if self.is_on:
            synchronize(self._device)
            self.total_s = clock.now() - self._begun_s
        super().end()

    def chrome(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json.gz"
            self.trace.export_chrome_trace(str(file))
            return file.read_bytes()


def _placed(
    events: Iterable[Any], modules: ModuleCalls, operators: Collection[str]
) -> Iterator[tuple[Any, Place]]:
    """Each event of the processor's with its place; those around it come before it."""
    from torch._C._autograd import DeviceType

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
        if event.device_type != DeviceType.CPU or event.is_async:
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
    """Seconds in which any kernel ran: of those that overlap each moment once."""
    from torch._C._autograd import DeviceType

    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type != DeviceType.CPU and not event.is_user_annotation
    )
    busy, until = 0.0, float("-inf")
    for start, end in spans:
        busy += max(end - max(start, until), 0.0)
        until = max(until, end)
    return MICRO * busy
