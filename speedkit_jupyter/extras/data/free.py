"""Releases objects that no user variable refers to, and reports them."""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch

from speedkit_jupyter.machines import devices
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import BLANK, Section, Table
from speedkit_jupyter.rounds.presentable import Shown, report_of
from speedkit_jupyter.support import units
from speedkit_jupyter.support.units import count

# A walk over the memory ends after MOST objects, some seconds; arrays below 64 KiB are passed over.
MOST, LARGE_BYTES = 2_000_000, 1 << 16
# Attributes of `sys` in which Python keeps the last error.
LAST = ("last_traceback", "last_value", "last_exc", "last_type")
COUNTED = "The table counts tensors and arrays that Python knows; tensors kept by graphs go too."
GRAPHS = "with a graph: .detach() releases the tensors that it keeps"


@dataclass(frozen=True)
class MemoryHolder:
    """A place that keeps objects alive.

    `roots` returns the objects, and `let_go` releases them; then `loses` no longer works.
    """

    name: str
    roots: Callable[[], list[Any]]
    let_go: Callable[[], object]
    loses: str = ""


@dataclass(frozen=True)
class HeldMemory:
    """Bytes of the `number` of tensors and arrays that a name or a holder keeps alive.

    `what` describes the largest of them, and `graphs` is the number of tensors with a graph.
    """

    name: str
    bytes: int
    number: int
    what: str
    loses: str = ""
    graphs: int = 0

    @classmethod
    def of(cls, name: str, values: Sequence[Any], loses: str = "") -> HeldMemory:
        """Return the memory of one or more values."""
        largest = max(values, key=lambda one: size([one]))
        shape = "×".join(map(str, getattr(largest, "shape", ()))) or "scalar"
        device = str(getattr(largest, "device", "cpu"))
        what = f"{shape} {getattr(largest, 'dtype', '')}".replace("torch.", "")
        what += f" on {device}" if device != "cpu" else ""
        graphs = sum(getattr(value, "grad_fn", None) is not None for value in values)
        return cls(name, size(values), len(values), what, loses, graphs)


@dataclass(repr=False)
class Freed(Shown):
    """The result: memory that was `let_go`, and memory that the user's own names keep (`kept`).

    `process_bytes` is the process's main memory before and after, and `devices_bytes` the memory of
    tensors on each accelerator.
    """

    REPORTS = __name__

    let_go: list[HeldMemory] = field(default_factory=list)
    kept: list[HeldMemory] = field(default_factory=list)
    process_bytes: tuple[int, int] = (0, 0)
    devices_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"holder": one.name, "bytes": one.bytes, "values": one.number, "what": one.what}
            for one in self.let_go
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows(),
            "kept": [{"name": one.name, "bytes": one.bytes, "what": one.what} for one in self.kept],
            "process_bytes": list(self.process_bytes),
            "devices_bytes": {name: list(pair) for name, pair in self.devices_bytes.items()},
        }


def free(holders: Iterable[MemoryHolder], names: Mapping[str, Any], apart: Sequence[Any]) -> Freed:
    """Release the objects of `holders`, except those that the user's `names` reach.

    `apart` are objects that lead to everything: the notebook's namespace and its shell.
    """
    import psutil

    resident_bytes = lambda: int(psutil.Process().memory_info().rss)  # noqa: E731
    reach = {name: reached([value], apart) for name, value in names.items()}
    users = {_piece(value)[0] for values in reach.values() for value in values}
    process_bytes, devices_bytes = resident_bytes(), _allocated_bytes()
    unreferenced_bytes = _living_bytes()
    gc.collect()
    unreferenced_bytes -= _living_bytes()
    # One by one: no variable here may refer to their objects at the end.
    let_go = [one for holder in holders if (one := _let_go(holder, users, apart)) is not None]
    if unreferenced_bytes > 0:
        word = "circles of objects that nothing refers to"
        let_go.append(HeldMemory(word, unreferenced_bytes, 0, "found by gc.collect()"))
    gc.collect()
    devices.release_cached()
    if sys.platform == "linux":  # gives free pages to the system, where its C library can
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    kept = [HeldMemory.of(name, values) for name, values in reach.items() if values]
    kept = [one for one in kept if one.bytes >= 1 << 20 or one.graphs]  # less than a MiB is little
    return Freed(
        let_go,
        sorted(kept, key=lambda one: -one.bytes)[:8],
        (process_bytes, resident_bytes()),
        {name: (devices_bytes.get(name, 0), now) for name, now in _allocated_bytes().items()},
    )


def _let_go(
    holder: MemoryHolder, users: Collection[object], apart: Sequence[Any]
) -> HeldMemory | None:
    """Release a holder's objects; return their memory without pieces that the users' names hold."""
    values = [one for one in reached(holder.roots(), apart) if _piece(one)[0] not in users]
    if not values:
        return None
    held = HeldMemory.of(holder.name, values, holder.loses)
    del values
    holder.let_go()
    return held


def _living_bytes() -> int:
    return size(value for value in gc.get_objects() if is_large(value))


def _allocated_bytes() -> dict[str, int]:
    """Return the memory of tensors on each accelerator in use."""
    used = {kind.name: getattr(kind.module, "memory_allocated", None) for kind in devices.in_use()}
    return {name: int(allocated()) for name, allocated in used.items() if allocated is not None}


def last_error(more: Sequence[tuple[Any, str]] = ()) -> MemoryHolder:
    """Return the holder of the last error: Python, and `more` attributes of objects."""
    kept = [*((sys, name) for name in LAST), *more]

    def roots() -> list[Any]:
        values = (getattr(owner, name, None) for owner, name in kept)
        return [value for value in values if value is not None]

    def forget() -> None:
        for owner, name in kept:
            if owner is sys:
                vars(sys).pop(name, None)
            elif hasattr(owner, name):
                setattr(owner, name, None)

    return MemoryHolder("the last error", roots, forget, "%debug and %tb of it")


def reached(roots: Iterable[Any], apart: Iterable[Any] = ()) -> list[Any]:
    """Return the tensors and large arrays that the roots keep alive.

    Objects that only modules, or the objects `apart`, lead to are left out.
    """
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    seen, found = set(map(id, itertools.chain(apart, map(vars, modules)))), list[Any]()
    waiting: deque[Any] = deque([list(roots)])
    while waiting and len(seen) < MOST:
        for part in gc.get_referents(waiting.popleft()):
            # No isinstance here and in is_large: it asks a dead proxy for its class.
            if id(part) in seen or issubclass(type(part), ModuleType | type):
                continue
            seen.add(id(part))
            if is_large(part):
                found.append(part)
            if gc.is_tracked(part) or is_large(part):
                waiting.append(part)
    return found


def is_large(value: Any) -> bool:
    """Return whether it is a tensor, or an array of LARGE_BYTES or more."""
    is_array = issubclass(type(value), np.ndarray)
    return issubclass(type(value), torch.Tensor) or (is_array and value.nbytes >= LARGE_BYTES)


def size(values: Iterable[Any]) -> int:
    """Return the bytes of tensors and arrays; views of one piece of memory count once."""
    pieces: dict[object, int] = {}
    for value in values:
        place, number = _piece(value)
        pieces[place] = max(number, pieces.get(place, 0))
    return sum(pieces.values())


def _piece(value: Any) -> tuple[object, int]:
    """Return a key of the piece of memory of a tensor or array, and its bytes."""
    if hasattr(value, "fake_mode"):
        return id(value), 0  # without memory; it warns of requests for some
    try:
        storage = value.untyped_storage()
        return (str(value.device), storage.data_ptr() or id(value)), int(storage.nbytes())
    except Exception:  # an array, or a tensor without memory of its own (sparse, meta, wrapped)
        while isinstance(getattr(value, "base", None), np.ndarray):
            value = value.base
        if isinstance(value, np.ndarray):
            return ("cpu", value.__array_interface__["data"][0]), int(value.nbytes)
        return id(value), int(getattr(value, "nbytes", 0))


@report_of.register
def free_report(freed: Freed) -> Document:
    """Return the released memory, and the names that hold the rest."""
    columns = ("held by", "held", "the largest of it", "gone with it")
    named = ("name", "holds", "the largest of it", "remark")
    let_go, kept = [], []
    for held in freed.let_go:
        number = f", {count(held.number, 'value')}" if held.number else ""
        row = (held.name, units.size(held.bytes), held.what + number, held.loses or BLANK)
        let_go.append(row)
    for own in freed.kept:
        graphs = f"{count(own.graphs, 'tensor')} {GRAPHS}" if own.graphs else BLANK
        kept.append((own.name, units.size(own.bytes), own.what, graphs))
    before, after = freed.process_bytes
    lines = [f"This process: {units.size(before)} of main memory before, {units.size(after)} now."]
    headline = "Nothing to let go of: only your own names hold tensors"
    if let_go:
        lines.append(COUNTED)
        released = max(sum(one.bytes for one in freed.let_go), before - after)
        headline = f"Let go of {units.size(released)}"
        for name, (was, now) in freed.devices_bytes.items():
            headline += f"; on {name} {units.size(was)} became {units.size(now)}"
    names = Table(named, kept, named[1:2], wraps=named[2:3])
    own_names = Section(names, "Your own names, which were not touched")
    gone = Table(columns, let_go, columns[1:2], wraps=columns[2:3])
    return Document(headline, [gone, own_names, "\n".join(lines)], freed.to_dict())
