"""Whose work it is: operations, bytes and seconds of each operator, in which module and pass."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function
from torch.utils.flop_counter import flop_registry

from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.roofline import eager
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.wrappers import unwrapped
from speedkit_jupyter.torchglue import private as torch_private
from speedkit_jupyter.torchglue import torch_profiler
from speedkit_jupyter.torchglue.confinement import patched

# These read no more of a table than they give.
LOOKUPS = ("aten::embedding", "aten::index_select", "aten::index", "aten::gather")
# And these write nothing yet.
EMPTY = ("aten::empty", "aten::new_empty")
# In the names of torch's events: a module that is called, a node of the backward pass.
MODULE, NODE = "module: ", "autograd::engine::evaluate_function: "
# Python and what of torch is no operator, between the events.
PYTHON = "Python"
MICRO = 1e-6
IN_USE = "torch's profiler is at work in this code already, and there can be only one"


class OperatorPlace(NamedTuple):
    """An operator, the module that it works for (empty outside of all), and in which pass."""

    module: str
    is_backward: bool
    operator: str


class OperatorCall(NamedTuple):
    """One call of an operator, and the dtype that it computes in."""

    place: OperatorPlace
    dtype: Any
    flops: int
    moved_bytes: int


class ModuleCalls:
    """Follows the calls of modules in this thread; `names` are theirs, by their ids.

    Autograd numbers nodes as a thread makes them: so a node's number tells the module that made it.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names, self._inside = names, list[str]()
        # From each number on nodes are the module's of the same place.
        self._numbers, self._whose = list[int](), list[str]()

    @property
    def here(self) -> str:
        """Return the innermost module that is called now; empty outside of all."""
        return self._inside[-1] if self._inside else ""

    def of_node(self, number: int) -> str:
        """Return the module that made the node of this number; empty where none did."""
        at = bisect_right(self._numbers, number) - 1
        return self._whose[at] if at >= 0 else ""

    def at_work(self) -> tuple[str, bool]:
        """Return the module that works, and whether it is the backward pass."""
        node = torch_private.current_node()
        if node is None:
            return self.here, False
        return self.here or self.of_node(torch_private.node_number(node)), True

    @contextmanager
    def followed(
        self, around: Callable[[str], AbstractContextManager[Any]] = nullcontext
    ) -> Iterator[None]:
        """Follow calls in the block; `around` makes what surrounds each, from the module's name."""
        with patched(torch.nn.Module, "__call__", partial(self._calling, around)):
            yield

    def _calling(self, around: Callable[[str], Any], original: Callable[..., Any]) -> Any:
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self._names.get(id(module)) or type(module).__name__
            self._inside.append(name)
            self._note()
            try:
                with around(name):
                    return original(module, *args, **kwargs)
            finally:
                self._inside.pop()
                self._note()

        return call

    def _note(self) -> None:
        self._numbers.append(torch_private.sequence_number())
        self._whose.append(self.here)


def names_of(
    models: Sequence[torch.nn.Module], given: Mapping[int, str]
) -> tuple[dict[int, str], dict[str, str]]:
    """Return the name of each module by its id (`net.blocks.3.mlp`), and its class by its name.

    `given` are names of models by their ids; others are called by their classes.
    """
    names: dict[int, str] = {}
    kinds: dict[str, str] = {}
    for model in models:
        inner = unwrapped(model)
        name = given.get(id(model)) or given.get(id(inner)) or type(inner).__name__
        name = name.replace(".", "_")
        numbered = (f"{name} {number}" for number in count(2))
        root = next(one for one in chain([name], numbered) if one not in kinds)
        for path, module in inner.named_modules(prefix=root):
            names.setdefault(id(module), path)
            kinds.setdefault(path, type(module).__name__)
        names.setdefault(id(model), root)
    return names, kinds


def counted(call: Callable[[], object], modules: ModuleCalls) -> Counter[OperatorCall]:
    """Count what a call does; compiled code runs as plain PyTorch.

    Operations are those that `torch.utils.flop_counter` knows (matrix products, convolutions,
    attention), bytes the tensors that are read and written.
    """
    found = Counter[OperatorCall]()

    class Counting(torch_private.dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            packet = torch_private.operator_packet(function)
            if packet is None:  # an operator of a higher order, which calls others
                return function(*args, **kwargs)
            if any(hasattr(kind, "__tensor_flatten__") for kind in types):
                return NotImplemented  # of jagged tensors, say: what they are made of is counted
            if packet not in flop_registry and not any(map(_is_nested, args)):
                with self:
                    parts = function.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
            result = function(*args, **kwargs)
            formula = flop_registry.get(packet)
            flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
            read, given = _tensors((args, kwargs)), _tensors(result)
            moved = _moved_bytes(torch_private.operator_schema(function), read, given)
            if flops or moved:
                place = OperatorPlace(
                    *modules.at_work(), torch_private.operator_schema(function).name
                )
                dtypes = (t.dtype for t in (*read, *given) if t.dtype.is_floating_point)
                found[OperatorCall(place, next(dtypes, None), flops, moved)] += 1
            return result

    with eager(), modules.followed(), torch_private.dispatch_modes_put_back(), Counting():
        call()
    return found


def _is_nested(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_nested


def _tensors(values: Any) -> list[Any]:
    """Return the tensors in containers, each once."""
    leaves = torch_private.tree_leaves(values)
    return list({id(one): one for one in leaves if isinstance(one, torch.Tensor)}.values())


def _moved_bytes(schema: Any, read: list[Any], given: list[Any]) -> int:
    """Return the bytes read and written; a view of another tensor moves nothing."""
    if schema.name.startswith(EMPTY):
        return 0
    if schema.is_mutable:
        # Of a list of parameters, gradients and state it is not known which ones are written.
        return 2 * sum(_storage(tensor)[1] for tensor in read)
    places = {_storage(tensor)[0] for tensor in read}
    new = [size for place, size in map(_storage, given) if place not in places]
    if not sum(new) and given:
        return 0
    most = sum(new) if schema.name in LOOKUPS else math.inf
    return sum(new) + int(sum(min(_storage(tensor)[1], most) for tensor in read))


def _storage(tensor: Any) -> tuple[int, int]:
    """Return where a tensor lies, and its bytes: fewer than its shape says, if it is expanded."""
    size = int(tensor.numel() * tensor.element_size())
    try:
        storage = tensor.untyped_storage()
        return int(storage.data_ptr()), min(size, int(storage.nbytes()))
    except (NotImplementedError, RuntimeError):  # a sparse tensor has no storage
        return id(tensor), size


@dataclass
class Trace:
    """Seconds of each place in `total_s` of `calls`, and how often each event was seen.

    On a device they are of its kernels, and `busy_s` is the time in which any ran.
    """

    total_s: float = 0.0
    calls: int = 0
    seconds: defaultdict[OperatorPlace, float] = field(default_factory=lambda: defaultdict(float))
    times: Counter[str] = field(default_factory=Counter)
    busy_s: float | None = None

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
        if torch_private.is_profiled():
            raise StepError(IN_USE)
        follows = modules.followed(lambda name: record_function(MODULE + name))
        with torch_profiler.profiled() as trace, follows:
            begun_s = clock.now()
            call()
            synchronize(device)
            total_s = clock.now() - begun_s
        if not torch_profiler.was_alone(trace):
            raise StepError(IN_USE)
        events = [one for one in trace.events() or () if one.name != torch_profiler.BEGINS]
        on_cpu, traced_s = device.type == "cpu", 0.0
        for event, place in _placed(events, modules, operators):
            own_us = event.self_cpu_time_total if on_cpu else event.self_device_time_total
            self.seconds[place] += MICRO * own_us
            traced_s += MICRO * own_us
            if event.name == place.operator or event.name.startswith(MODULE):
                self.times[event.name] += 1
        if on_cpu:
            self.seconds[OperatorPlace("", False, PYTHON)] += max(total_s - traced_s, 0.0)
        else:
            own = (event for event in events if not event.is_user_annotation)
            kernels = (event for event in own if event.device_type.name != "CPU")
            self.busy_s = (self.busy_s or 0.0) + torch_profiler.covered_s(kernels)
        self.total_s += total_s
        self.calls += 1


def _placed(
    events: Iterable[Any], modules: ModuleCalls, operators: Collection[str]
) -> Iterator[tuple[Any, OperatorPlace]]:
    """Yield each event of the processor's with its place; those around it come before it."""
    known: dict[int, OperatorPlace] = {}

    def place(event: Any) -> OperatorPlace:
        outer = event.cpu_parent
        around = known[id(outer)] if outer is not None else OperatorPlace("", False, PYTHON)
        if event.name.startswith(MODULE):
            return around._replace(module=event.name.removeprefix(MODULE), operator=PYTHON)
        if event.name.startswith(NODE):
            module = around.module or modules.of_node(event.sequence_nr)
            return OperatorPlace(module, True, "autograd")
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
