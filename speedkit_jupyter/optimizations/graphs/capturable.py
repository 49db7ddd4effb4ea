"""Whether a call can be recorded: found by looking at one as it is made.

What is recorded is the work of the GPU. A call that does more than that, or other work each time,
is told by what it does: each operation goes by here once.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.graphs.call_kinds import state
from speedkit_jupyter.optimizations.graphs.call_results import (
    hindrance_behind,
    hindrance_in,
    memory,
)

if TYPE_CHECKING:
    import torch

STRANGER = "it reads tensors that are neither weights nor buffers of it, nor passed to it"
WAITS = "its Python code waits for results ({})"
COPIES = "it copies between devices, or draws on another one ({})"
OWN_GENERATOR = "it has a random generator of its own"
WRITES = "it writes to its {}"
PACKS = "it keeps less for its backward pass than it computes (checkpointing)"
OWN_BACKWARD = "it runs a backward pass of its own"
RUNS = "it runs {}, which is no single operation"
CHANGES = "its Python code changes what lies on the modules"
DRAWS = "its Python code draws random numbers"
# By a mask they give as many elements as it holds.
BY_MASK = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index")
COPYING = ("aten::copy_", "aten::_to_copy", "aten::to")
FRESH = ("aten::lift_fresh", "aten::lift", "aten::lift_fresh_copy")


def looked_at(
    call: Callable[[], Any], model: torch.nn.Module, tensors: Sequence[torch.Tensor]
) -> tuple[Any, Seen]:
    """What the call returns, and what it needs to be made once more.

    Raises `Found` with the result where it can't be recorded.
    """
    before, drawn = state(model), _random_states()
    watch = _watch()(model, tensors)
    with watch:
        result = call()
    why = watch.why
    if state(model) != before:
        why = why or CHANGES
    if not _alike(_random_states(), drawn):
        why = why or DRAWS
    why = why or hindrance_in(result, watch.known) or hindrance_behind(result, model, tensors)
    if why:
        raise Found(why, result)
    return result, Seen(watch.draws, frozenset(watch.writes))


@dataclass(frozen=True)
class Seen:
    """Whether a call draws random numbers, and the memory of the buffers that it writes to."""

    draws: bool
    writes: frozenset[int]


class Found(Exception):
    """A call that can't be recorded, and what it returned."""

    def __init__(self, why: str, result: Any) -> None:
        super().__init__(why)
        self.why, self.result = why, result


class _Watching:
    """Notes the first reason, and whether anything was drawn; changes nothing."""

    def __init__(self, model: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.known = {
            memory(tensor): kind
            for kind, ones in (
                ("buffers", model.buffers()),
                ("weights", model.parameters()),
                ("inputs", tensors),
            )
            for tensor in ones
        }
        every = (*tensors, *model.parameters(), *model.buffers())
        self._device = every[0].device if every else None
        self._own = {0}
        self.why, self.draws, self.writes = "", False, set[int]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given, made = _tensors((args, kwargs)), _tensors(result)
        if not self.why:
            self.why = self._reason(function, args, kwargs, given, made)
        self._own |= {memory(tensor) for tensor in made} - self.known.keys()
        return result

    def _reason(
        self, function: Any, args: Any, kwargs: Any, given: list[Any], made: list[Any]
    ) -> str:
        schema = getattr(function, "_schema", None)
        if schema is None:
            return RUNS.format(function)
        name, tags = schema.name, {tag.name for tag in function.tags}
        if name not in FRESH and any(
            memory(tensor) not in self.known and memory(tensor) not in self._own for tensor in given
        ):
            return STRANGER
        return (
            _waits(name, tags, args)
            or _leaves_the_device(name, tags, given, made, self._device)
            or self._draws_or_writes(function, tags, args, kwargs)
        )

    def _draws_or_writes(self, function: Any, tags: Any, args: Any, kwargs: Any) -> str:
        import torch

        top = torch._C._autograd  # type: ignore[attr-defined]
        if getattr(top, "_top_saved_tensors_default_hooks", lambda _: None)(True) is not None:
            return PACKS
        if torch._C._current_graph_task_id() >= 0:
            return OWN_BACKWARD
        if "nondeterministic_seeded" in tags:
            self.draws = True
            if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
                return OWN_GENERATOR
        for tensor in _written(function, args, kwargs):
            kind = self.known.get(memory(tensor))
            if kind not in (None, "buffers"):
                return WRITES.format(kind)
            if kind is not None:
                self.writes.add(memory(tensor))
        return ""


@cache
def _watch() -> type[Any]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(_Watching, TorchDispatchMode):
        """The same as a mode of torch, which is imported late."""

    return Watch


def _waits(name: str, tags: set[str], args: Any) -> str:
    """For a number that Python is told, or that decides how large a result is."""
    import torch

    masks = (torch.bool, torch.uint8)
    if name in BY_MASK:
        indices = _tensors(args[1:2])
        return WAITS.format(name) if any(index.dtype in masks for index in indices) else ""
    waiting = {"data_dependent_output", "dynamic_output_shape", "cudagraph_unsafe"}
    return WAITS.format(name) if tags & waiting else ""


def _leaves_the_device(
    name: str, tags: set[str], given: list[Any], made: list[Any], device: Any
) -> str:
    """Single numbers of the CPU may take part: they are constants of the operation."""
    devices = {tensor.device for tensor in (*given, *made)}
    seeded = "nondeterministic_seeded" in tags
    if seeded and devices - {device}:
        return COPIES.format(name)
    if len(devices) < 2:
        return ""
    others = [tensor for tensor in (*given, *made) if tensor.device != device]
    if name not in COPYING and all(
        tensor.dim() == 0 and tensor.device.type == "cpu" for tensor in others
    ):
        return ""
    return COPIES.format(name)


def _written(function: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    for number, argument in enumerate(function._schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)


def _tensors(values: Any) -> list[Any]:
    import torch

    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


def _random_states() -> tuple[Any, Any]:
    """Python's and NumPy's; torch's own on the CPU are seen as operations."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _alike(first: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    if first[0] != other[0]:
        return False
    if first[1] is None or other[1] is None:
        return True
    return all(map(_same, first[1], other[1]))


def _same(first: Any, other: Any) -> bool:
    return bool((first == other).all()) if hasattr(first, "all") else bool(first == other)
