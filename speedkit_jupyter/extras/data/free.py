"""Lets go of what no name of the user's stands for, and says what that was."""

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
from speedkit_jupyter.rounds.presentable import Shown

# Names that hold less than this are not listed, and no more than this number of names.
LEAST_BYTES, MOST_NAMES = 1 << 20, 8
# More objects are not looked at, and smaller arrays do not matter.
MOST, LARGE_BYTES = 2_000_000, 1 << 16
# Where Python keeps the last error.
LAST = ("last_traceback", "last_value", "last_exc", "last_type")


@dataclass(frozen=True)
class MemoryHolder:
    """`roots` gives what it holds now, `let_go` makes it hold nothing; `loses` is what is gone
    afterwards.
    """

    name: str
    roots: Callable[[], list[Any]]
    let_go: Callable[[], object]
    loses: str = ""


@dataclass(frozen=True)
class Held:
    """Bytes of the tensors and arrays that a name, or a holder, keeps alive: their `number`, the
    largest of them as `what`, how many have `graphs`, and what `loses` its use without them.
    """

    name: str
    bytes: int
    number: int
    what: str
    loses: str = ""
    graphs: int = 0

    @classmethod
    def of(cls, name: str, values: Sequence[Any], loses: str = "") -> Held:
        """Return it for one or more values."""
        largest = max(values, key=lambda one: size([one]))
        shape = "×".join(map(str, getattr(largest, "shape", ()))) or "scalar"
        device = str(getattr(largest, "device", "cpu"))
        what = f"{shape} {getattr(largest, 'dtype', '')}".replace("torch.", "")
        what += f" on {device}" if device != "cpu" else ""
        graphs = sum(getattr(value, "grad_fn", None) is not None for value in values)
        return cls(name, size(values), len(values), what, loses, graphs)


@dataclass(repr=False)
class Freed(Shown):
    """`let_go` is what was held and is not any more, `kept` what the user's own names hold.

    `process_bytes` is what the process had of main memory before and after, and `devices_bytes`
    what tensors took on each accelerator.
    """

    REPORTS = f"{__package__}.report"

    let_go: list[Held] = field(default_factory=list)
    kept: list[Held] = field(default_factory=list)
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
    """Let go of what `holders` hold; the user's `names`, and what they reach, stay.

    `apart` is what leads everywhere: the notebook's namespace and its shell.
    """
    import psutil

    resident_bytes = lambda: int(psutil.Process().memory_info().rss)  # noqa: E731
    reach = {name: reached([value], apart) for name, value in names.items()}
    users = {_piece(value)[0] for values in reach.values() for value in values}
    process_bytes, devices_bytes = resident_bytes(), _allocated_bytes()
    unreferenced_bytes = _living_bytes()
    gc.collect()
    unreferenced_bytes -= _living_bytes()
    # Nothing here refers to what they held by the end: so they come one by one.
    let_go = [one for holder in holders if (one := _let_go(holder, users, apart)) is not None]
    if unreferenced_bytes > 0:
        word = "circles of objects that nothing refers to"
        let_go.append(Held(word, unreferenced_bytes, 0, "found by gc.collect()"))
    gc.collect()
    devices.release_cached()
    if sys.platform == "linux":  # gives free pages to the system, where its C library can
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    kept = [Held.of(name, values) for name, values in reach.items() if values]
    kept = [one for one in kept if one.bytes >= LEAST_BYTES or one.graphs]
    return Freed(
        let_go,
        sorted(kept, key=lambda one: -one.bytes)[:MOST_NAMES],
        (process_bytes, resident_bytes()),
        {name: (devices_bytes.get(name, 0), now) for name, now in _allocated_bytes().items()},
    )


def _let_go(holder: MemoryHolder, users: Collection[object], apart: Sequence[Any]) -> Held | None:
    """Make it hold nothing; return what it held beside the pieces of memory of the users'."""
    values = [one for one in reached(holder.roots(), apart) if _piece(one)[0] not in users]
    if not values:
        return None
    held = Held.of(holder.name, values, holder.loses)
    del values
    holder.let_go()
    return held


def _living_bytes() -> int:
    return size(value for value in gc.get_objects() if is_large(value))


def _allocated_bytes() -> dict[str, int]:
    """Return what tensors take on each accelerator in use."""
    used = {kind.name: getattr(kind.module, "memory_allocated", None) for kind in devices.in_use()}
    return {name: int(allocated()) for name, allocated in used.items() if allocated is not None}


def last_error(more: Sequence[tuple[Any, str]] = ()) -> MemoryHolder:
    """Return what keeps the last error: Python itself, and `more` objects in these attributes."""
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
    """Return the tensors and large arrays that the roots keep alive; not what only modules, or the
    objects `apart`, lead to.
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
    """Return whether it is a tensor, or an array of more than a little memory."""
    is_array = issubclass(type(value), np.ndarray)
    return issubclass(type(value), torch.Tensor) or (is_array and value.nbytes >= LARGE_BYTES)


def size(values: Iterable[Any]) -> int:
    """Return the bytes behind tensors and arrays; views of one piece of memory count once."""
    pieces: dict[object, int] = {}
    for value in values:
        place, number = _piece(value)
        pieces[place] = max(number, pieces.get(place, 0))
    return sum(pieces.values())


def _piece(value: Any) -> tuple[object, int]:
    """Return the piece of memory that a tensor or array lies in, and its bytes."""
    if hasattr(value, "fake_mode"):
        return id(value), 0  # without memory; it warns where it is asked for some
    try:
        storage = value.untyped_storage()
        return (str(value.device), storage.data_ptr() or id(value)), int(storage.nbytes())
    except Exception:  # an array, or a tensor without memory of its own (sparse, meta, wrapped)
        while isinstance(getattr(value, "base", None), np.ndarray):
            value = value.base
        if isinstance(value, np.ndarray):
            return ("cpu", value.__array_interface__["data"][0]), int(value.nbytes)
        return id(value), int(getattr(value, "nbytes", 0))
