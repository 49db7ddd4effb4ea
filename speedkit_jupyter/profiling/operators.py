"""Each operator, in which module and pass: how long it takes by torch's own profiler, and how many
operations and bytes by its counters.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.measure.checks import torch_profiler
from speedkit_jupyter.measure.checks.roofline import eager
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.profiling.module_calls import ModuleCalls
from speedkit_jupyter.support.exceptions import StepError

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

        if torch_profiler.is_in_use():
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
    """Return seconds in which any kernel ran: of those that overlap each moment once."""
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


# These read no more of a table than they give.
LOOKUPS = ("aten::embedding", "aten::index_select", "aten::index", "aten::gather")
# And these write nothing yet.
EMPTY = ("aten::empty", "aten::new_empty")


class Work(NamedTuple):
    """One call of an operator, and the dtype that it computes in."""

    place: Place
    dtype: Any
    flops: int
    moved_bytes: int


def counted(call: Callable[[], object], modules: ModuleCalls) -> Counter[Work]:
    """Count what a call does.

    Operations are those that torch's formulas know (`torch.utils.flop_counter`): matrix products,
    convolutions, attention. Bytes are the tensors that are read and written. Compiled code runs as
    plain PyTorch.
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    found = Counter[Work]()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            packet = getattr(function, "_overloadpacket", None)
            if packet is None:  # an operator of a higher order, which calls others
                return function(*args, **kwargs)
            if packet not in flop_registry:
                with self:
                    parts = function.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
            result = function(*args, **kwargs)
            formula = flop_registry.get(packet)
            flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
            read, given = _tensors((args, kwargs)), _tensors(result)
            moved = _moved_bytes(function._schema, read, given)
            if flops or moved:
                place = Place(*_whose(modules), function._schema.name)
                dtypes = (t.dtype for t in (*read, *given) if t.dtype.is_floating_point)
                found[Work(place, next(dtypes, None), flops, moved)] += 1
            return result

    with eager(), modules.followed(), Counting():
        call()
    return found


def _whose(modules: ModuleCalls) -> tuple[str, bool]:
    """Return the module, and whether it is the backward pass."""
    import torch

    node = torch._C._current_autograd_node()
    if node is None:
        return modules.here, False
    return modules.here or modules.of_node(node._sequence_nr()), True


def _tensors(values: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _moved_bytes(schema: Any, read: list[Any], given: list[Any]) -> int:
    """Read and written; a view of another tensor moves nothing."""
    if schema.name.startswith(EMPTY):
        return 0
    if schema.is_mutable:
        # Of a list of parameters, gradients and state it is not known which ones are written.
        return 2 * sum(map(_bytes, _each_once(read)))
    places = {_place_in_memory(tensor) for tensor in read}
    new = [tensor for tensor in given if _place_in_memory(tensor) not in places]
    written = sum(map(_bytes, _each_once(new)))
    if not written and given:
        return 0
    most = written if schema.name in LOOKUPS else math.inf
    return written + int(sum(min(_bytes(tensor), most) for tensor in _each_once(read)))


def _each_once(tensors: Iterable[Any]) -> list[Any]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _place_in_memory(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):  # sparse, or another kind without storage
        return id(tensor)


def _bytes(tensor: Any) -> int:
    """Return the size of the elements that there are: fewer than its shape says, if expanded."""
    size = int(tensor.numel() * tensor.element_size())
    try:
        return min(size, int(tensor.untyped_storage().nbytes()))
    except (NotImplementedError, RuntimeError):
        return size
