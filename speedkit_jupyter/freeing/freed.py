"""Lets go of what no name of the user's stands for, and says what that was."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from speedkit_jupyter.freeing.holders import Holder
from speedkit_jupyter.freeing.reach import Reach, is_large, pieces_of, reached, size, without
from speedkit_jupyter.machines import devices
from speedkit_jupyter.measure.results.presentable import Shown

# Names that hold less than this are not listed, and no more than so many.
LEAST_BYTES, MOST_NAMES = 1 << 20, 8


@dataclass(frozen=True)
class Held:
    """What a holder kept alive that no name of the user's does: so many bytes of tensors and
    arrays, the largest of them as `what`. `loses` is what is gone with it.
    """

    holder: str
    bytes: int
    number: int
    what: str
    loses: str = ""


@dataclass(frozen=True)
class Own:
    """A name of the user's, the bytes behind it, and by which way it holds most of them."""

    name: str
    bytes: int
    what: str
    graphs: int = 0


@dataclass(repr=False)
class Freed(Shown):
    """`let_go` is what was held and is not any more, `kept` what the user's own names hold.

    `before_bytes` and `after_bytes` are those of all tensors and arrays that Python knows;
    `process_bytes` what the process had of main memory before and after, and `devices_bytes` what
    tensors took on each accelerator.
    """

    let_go: list[Held] = field(default_factory=list)
    kept: list[Own] = field(default_factory=list)
    before_bytes: int = 0
    after_bytes: int = 0
    process_bytes: tuple[int, int] = (0, 0)
    devices_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each that held something."""
        return [
            {"holder": one.holder, "bytes": one.bytes, "values": one.number, "what": one.what}
            for one in self.let_go
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "rows": self.rows(),
            "kept": [{"name": one.name, "bytes": one.bytes, "what": one.what} for one in self.kept],
            "before_bytes": self.before_bytes,
            "after_bytes": self.after_bytes,
            "process_bytes": list(self.process_bytes),
            "devices_bytes": {name: list(pair) for name, pair in self.devices_bytes.items()},
        }


def free(holders: Iterable[Holder], names: Mapping[str, Any], apart: Sequence[Any]) -> Freed:
    """Each of `holders` that holds tensors lets go; the user's `names`, and what they reach, stay.

    `apart` is what leads everywhere: the notebook's namespace and its shell.
    """
    reaches = {name: reached([value], apart) for name, value in names.items()}
    users = pieces_of(value for reach in reaches.values() for value in reach.values())
    found = Freed(before_bytes=size(living()))
    process_bytes, devices_bytes = resident_bytes(), allocated_bytes()
    loose = _collected()
    # Nothing here refers to what they held by the end: so they come one by one.
    found.let_go = [held for held in map(partial(_let_go, users, apart), holders) if held]
    found.let_go += [] if loose is None else [loose]
    _give_back()
    found.kept = sorted(_own(reaches), key=lambda one: -one.bytes)[:MOST_NAMES]
    found.after_bytes = size(living())
    found.process_bytes = (process_bytes, resident_bytes())
    after = allocated_bytes()
    found.devices_bytes = {name: (devices_bytes.get(name, 0), after[name]) for name in after}
    return found


def _let_go(users: set[object], apart: Sequence[Any], holder: Holder) -> Held | None:
    """Where it holds something."""
    held = _held(holder, users, apart)
    if held is not None:
        holder.let_go()
    return held


def _held(holder: Holder, users: set[object], apart: Sequence[Any]) -> Held | None:
    reach = reached(holder.roots(), apart)
    values = without(reach.values(), users)
    if not values:
        return None
    most = max(values, key=lambda value: size([value]))
    what = _described(most, reach.way(most))
    return Held(holder.name, size(values), len(values), what, holder.loses)


def _collected() -> Held | None:
    """What only circles of objects held, that nothing refers to."""
    before = size(living())
    gc.collect()
    freed = before - size(living())
    if freed <= 0:
        return None
    return Held("circles of objects that nothing refers to", freed, 0, "found by gc.collect()")


def _own(reaches: Mapping[str, Reach]) -> Iterator[Own]:
    for name, reach in reaches.items():
        values = reach.values()
        total = size(values)
        graphs = sum(getattr(value, "grad_fn", None) is not None for value in values)
        if values and (total >= LEAST_BYTES or graphs):
            most = max(values, key=lambda value: size([value]))
            yield Own(name, total, _described(most, reach.way(most)), graphs)


def _described(value: Any, way: str) -> str:
    shape = "×".join(str(length) for length in getattr(value, "shape", ())) or "scalar"
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    device = getattr(value, "device", None)
    place = f" on {device}" if device is not None and str(device) != "cpu" else ""
    inside = way if way[:1] in ("", " ") else f" in {way}"
    return f"{shape} {dtype}{place}{inside}"


def living() -> list[Any]:
    """All tensors and large arrays that Python knows of."""
    return [value for value in gc.get_objects() if is_large(value)]


def resident_bytes() -> int:
    """What the process has of main memory."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def allocated_bytes() -> dict[str, int]:
    """What tensors take on each accelerator in use."""
    found: dict[str, int] = {}
    for kind in devices.in_use():
        allocated = getattr(kind.module, "memory_allocated", None)
        if allocated is not None:
            found[kind.name] = int(allocated())
    return found


def _give_back() -> None:
    """Caches to the driver, and free pages to the system, where its C library can."""
    gc.collect()
    devices.release_cached()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
