"""Measure the time of modules and operators with torch's profiler."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.wrappers import unwrapped
from speedkit_jupyter.torchglue import private as torch_private
from speedkit_jupyter.torchglue import torch_profiler
from speedkit_jupyter.torchglue.confinement import patched

# Prefixes of event names: SpeedKit's for module calls, and torch's for nodes of a backward pass.
MODULE, NODE = "module: ", "autograd::engine::evaluate_function: "
# The row for time between events: Python, and torch's work outside of operators.
PYTHON = "Python"
IN_USE = "the code already runs torch's profiler, and only one can run at a time"


class OperatorPlace(NamedTuple):
    """The place of an operator: its module (or ""), whether in a backward pass, and its name."""

    module: str
    is_backward: bool
    operator: str


@dataclass
class Cost:
    """The cost of one module or operator in a call of the step.

    `share` is its share of the call's time, 0 to 1. `backward` is the part of `share` in the
    backward pass. `times` counts calls of the module or operator. `kind` is a module's class.
    """

    name: str
    kind: str = ""
    share: float = 0.0
    backward: float = 0.0
    times: float = 0.0


@dataclass
class Costs:
    """The costs of modules, each without its inner modules, and of operators; largest first.

    `busy` is the share of time in which a device worked; None on a CPU, or if no kernel is seen.
    """

    modules: list[Cost] = field(default_factory=list)
    operators: list[Cost] = field(default_factory=list)
    busy: float | None = None


def _marked(names: Mapping[int, str]) -> AbstractContextManager[None]:
    def call(original: Any, module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        with record_function(MODULE + (names.get(id(module)) or type(module).__name__)):
            return original(module, *args, **kwargs)

    return patched(torch.nn.Module, "__call__", partial(partial, call))


def names_of(step: Step) -> tuple[dict[int, str], dict[str, str]]:
    """Return module names by id (`net.blocks.3.mlp`), and module classes by name."""
    names: dict[int, str] = {}
    kinds: dict[str, str] = {}
    for model, root in zip(step.models, step.model_names, strict=True):
        for path, module in unwrapped(model).named_modules(prefix=root):
            names.setdefault(id(module), path)
            kinds.setdefault(path, type(module).__name__)
        names.setdefault(id(model), root)
    return names, kinds


@dataclass
class OperatorTrace:
    """The seconds that traced calls of a step spend in each place, and counts of events.

    On an accelerator, seconds are kernel times, and `busy_s` is the time in which any kernel ran.
    """

    total_s: float = 0.0
    calls: int = 0
    seconds: defaultdict[OperatorPlace, float] = field(default_factory=lambda: defaultdict(float))
    times: Counter[str] = field(default_factory=Counter)
    busy_s: float | None = None

    def add(self, call: Callable[[], Any], names: Mapping[int, str], device: torch.device) -> None:
        """Trace one more call; `names` are names of modules by id.

        Raises StepError if another profiler is running, or if the call runs one.
        """
        if torch_private.is_profiled():
            raise StepError(IN_USE)
        with torch_profiler.profiled() as trace, _marked(names):
            begun_s = clock.now()
            call()
            synchronize(device)
            total_s = clock.now() - begun_s
        if not torch_profiler.was_alone(trace):
            raise StepError(IN_USE)
        events = [one for one in trace.events() or () if one.name != torch_profiler.BEGINS]
        on_cpu, traced_s = device.type == "cpu", 0.0
        for event, place in _placed(events):
            own_us = event.self_cpu_time_total if on_cpu else event.self_device_time_total
            self.seconds[place] += 1e-6 * own_us
            traced_s += 1e-6 * own_us
            if event.name == place.operator or event.name.startswith(MODULE):
                self.times[event.name] += 1
        if on_cpu:
            self.seconds[OperatorPlace("", False, PYTHON)] += max(total_s - traced_s, 0.0)
        else:
            own = (event for event in events if not event.is_user_annotation)
            # The profiler sees no kernels on some devices, such as MPS.
            if kernels := [event for event in own if event.device_type.name != "CPU"]:
                self.busy_s = (self.busy_s or 0.0) + covered_s(kernels)
        self.total_s += total_s
        self.calls += 1

    def costs(self, kinds: Mapping[str, str]) -> Costs:
        """Return the costs of modules and operators; `kinds` has class names by module name."""
        modules = self._costs("module")
        for one in modules:
            one.kind = kinds.get(one.name, "")
        busy = None if self.busy_s is None else self.busy_s / self.total_s
        return Costs(modules, self._costs("operator"), busy)

    def _costs(self, key: str) -> list[Cost]:
        """Return the costs grouped by the attribute `key` of places, the largest first."""
        found, name = dict[str, Cost](), attrgetter(key)
        for place, spent_s in self.seconds.items():
            cost, part = found.setdefault(name(place), Cost(name(place))), spent_s / self.total_s
            cost.share += part
            cost.backward += part * place.is_backward
        found.pop("", None)
        for at, cost in found.items():
            cost.times = self.times[MODULE + at if key == "module" else at] / self.calls
        return sorted(found.values(), key=lambda cost: -cost.share)


def _placed(events: Iterable[Any]) -> Iterator[tuple[Any, OperatorPlace]]:
    """Yield each synchronous CPU event with its place, outer events first.

    Operators inside an ATen operator count as that operator: `aten::linear` calls `aten::addmm`.
    A backward node's module is the module around it, else the module of its last forward event.
    """
    known: dict[int, OperatorPlace] = {}
    makers: dict[tuple[int, int], str] = {}

    def place(event: Any) -> OperatorPlace:
        outer = event.cpu_parent
        around = known[id(outer)] if outer is not None else OperatorPlace("", False, PYTHON)
        if event.name.startswith(MODULE):
            return around._replace(module=event.name.removeprefix(MODULE), operator=PYTHON)
        if event.name.startswith(NODE):
            module = around.module or makers.get((event.fwd_thread, event.sequence_nr), "")
            return OperatorPlace(module, True, "autograd")
        makers[event.thread, event.sequence_nr] = around.module
        if around.operator.startswith("aten::"):
            return around
        return around._replace(operator=event.name)

    for event in events:
        if event.device_type.name != "CPU" or event.is_async:
            continue
        waiting = []  # torch may list an event before its outer event if both have the same times
        while event is not None and id(event) not in known:
            waiting.append(event)
            event = event.cpu_parent
        for one in reversed(waiting):
            known[id(one)] = place(one)
            yield one, known[id(one)]


def covered_s(events: Iterable[Any]) -> float:
    """Return the seconds in which at least one event runs; overlaps count once."""
    covered_us, until_us = 0.0, float("-inf")
    for span in sorted((one.time_range for one in events), key=lambda one: one.start):
        covered_us += max(span.end - max(span.start, until_us), 0.0)
        until_us = max(until_us, span.end)
    return 1e-6 * covered_us
