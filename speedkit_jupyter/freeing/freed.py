"""Lets go of what no name of the user's stands for, and says what that was."""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from speedkit_jupyter.machines import devices
from speedkit_jupyter.measure.results.presentable import Shown

# Names that hold less than this are not listed, and no more than this number of names.
LEAST_BYTES, MOST_NAMES = 1 << 20, 8
# More objects are not looked at, and smaller arrays do not matter.
MOST, LARGE_BYTES = 2_000_000, 1 << 16
# Where Python keeps the last error.
LAST = ("last_traceback", "last_value", "last_exc", "last_type")


@dataclass(frozen=True)
class Holder:
    """`roots` gives what it holds now, `let_go` makes it hold nothing; `loses` is what is gone
    afterwards.
    """

    name: str
    roots: Callable[[], list[Any]]
    let_go: Callable[[], object]
    loses: str = ""


@dataclass(frozen=True)
class Held:
    """What a holder kept alive that no name of the user's does: bytes of tensors and arrays, the
    largest of them as `what`. `loses` is what is gone with it.
    """

    holder: str
    bytes: int
    number: int
    what: str
    loses: str = ""


@dataclass(frozen=True)
class Own:
    """A name of the user's, the bytes behind it, the largest piece of them, and how many of its
    tensors have a graph.
    """

    name: str
    bytes: int
    what: str
    graphs: int = 0


@dataclass(repr=False)
class Freed(Shown):
    """`let_go` is what was held and is not any more, `kept` what the user's own names hold.

    `process_bytes` is what the process had of main memory before and after, and `devices_bytes`
    what tensors took on each accelerator.
    """

    let_go: list[Held] = field(default_factory=list)
    kept: list[Own] = field(default_factory=list)
    process_bytes: tuple[int, int] = (0, 0)
    devices_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each that held something."""
        return [
            {"holder": one.holder, "bytes": one.bytes, "values": one.number, "what": one.what}
            for one in self.let_go
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "rows": self.rows(),
            "kept": [{"name": one.name, "bytes": one.bytes, "what": one.what} for one in self.kept],
            "process_bytes": list(self.process_bytes),
            "devices_bytes": {name: list(pair) for name, pair in self.devices_bytes.items()},
        }


def free(holders: Iterable[Holder], names: Mapping[str, Any], apart: Sequence[Any]) -> Freed:
    """Let go of what `holders` hold; the user's `names`, and what they reach, stay.

    `apart` is what leads everywhere: the notebook's namespace and its shell.
    """
    reach = {name: reached([value], apart) for name, value in names.items()}
    users = [value for values in reach.values() for value in values]
    process_bytes, on_devices = _resident_bytes(), _allocated_bytes()
    loose_bytes = _living_bytes()
    gc.collect()
    loose_bytes -= _living_bytes()
    # Nothing here refers to what they held by the end: so they come one by one.
    held = [one for holder in holders if (one := _let_go(holder, users, apart)) is not None]
    if loose_bytes > 0:
        word = "circles of objects that nothing refers to"
        held.append(Held(word, loose_bytes, 0, "found by gc.collect()"))
    _give_back()
    kept = sorted(_own(reach), key=lambda one: -one.bytes)[:MOST_NAMES]
    after = _allocated_bytes()
    return Freed(
        held,
        kept,
        (process_bytes, _resident_bytes()),
        {name: (on_devices.get(name, 0), now) for name, now in after.items()},
    )


def _let_go(holder: Holder, users: Sequence[Any], apart: Sequence[Any]) -> Held | None:
    """Make it hold nothing; return what it held of its own, if anything."""
    values = _without(reached(holder.roots(), apart), users)
    if not values:
        return None
    held = Held(holder.name, size(values), len(values), _largest(values), holder.loses)
    del values
    holder.let_go()
    return held


def _living_bytes() -> int:
    return size(value for value in gc.get_objects() if is_large(value))


def _own(reach: Mapping[str, list[Any]]) -> Iterator[Own]:
    for name, values in reach.items():
        total = size(values)
        graphs = sum(getattr(value, "grad_fn", None) is not None for value in values)
        if values and (total >= LEAST_BYTES or graphs):
            yield Own(name, total, _largest(values), graphs)


def _largest(values: Sequence[Any]) -> str:
    """Describe the largest: `1024×512 float32 on cuda:0`."""
    value = max(values, key=lambda one: size([one]))
    shape = "×".join(map(str, getattr(value, "shape", ()))) or "scalar"
    device = str(getattr(value, "device", "cpu"))
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    return f"{shape} {dtype}" + (f" on {device}" if device != "cpu" else "")


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _allocated_bytes() -> dict[str, int]:
    """Return what tensors take on each accelerator in use."""
    used = {kind.name: getattr(kind.module, "memory_allocated", None) for kind in devices.in_use()}
    return {name: int(allocated()) for name, allocated in used.items() if allocated is not None}


def _give_back() -> None:
    """Give caches to the driver, and free pages to the system, where its C library can."""
    gc.collect()
    devices.release_cached()
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)


def of_process() -> Iterator[Holder]:
    """Yield Python's own: the last error, and figures that pyplot keeps open."""

    def forget_error() -> None:
        for name in LAST:
            vars(sys).pop(name, None)

    yield Holder(
        "the last error",
        lambda: [getattr(sys, name) for name in LAST if hasattr(sys, name)],
        forget_error,
        "%debug and %tb of it",
    )
    helpers: Any = sys.modules.get("matplotlib._pylab_helpers")
    for manager in list(helpers.Gcf.get_all_fig_managers()) if helpers is not None else ():
        yield Holder(
            f"figure {manager.num}, which pyplot keeps open",
            lambda manager=manager: [manager.canvas.figure],  # type: ignore[misc]
            lambda manager=manager: helpers.Gcf.destroy(manager),  # type: ignore[misc]
            "drawing into it with plt",
        )


def reached(roots: Iterable[Any], apart: Iterable[Any] = ()) -> list[Any]:
    """Return the tensors and large arrays that the roots keep alive; not what only modules, or the
    objects `apart`, lead to.
    """
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    seen, found = set(map(id, itertools.chain(apart, map(vars, modules)))), list[Any]()
    waiting: deque[Any] = deque([list(roots)])
    while waiting and len(seen) < MOST:
        for part in gc.get_referents(waiting.popleft()):
            # Not isinstance, which asks a dead proxy for its class.
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
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(type(value), torch.Tensor):
        return True
    return _is_array(value) and value.nbytes >= LARGE_BYTES


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), numpy.ndarray)


def size(values: Iterable[Any]) -> int:
    """Return the bytes behind tensors and arrays; views of one piece of memory count once."""
    pieces: dict[object, int] = {}
    for value in values:
        place, number = _piece(value)
        pieces[place] = max(number, pieces.get(place, 0))
    return sum(pieces.values())


def _without(values: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Return those that share no piece of memory with the others."""
    pieces = {_piece(value)[0] for value in others}
    return [value for value in values if _piece(value)[0] not in pieces]


def _piece(value: Any) -> tuple[object, int]:
    """Return the piece of memory that a tensor or array lies in, and its bytes."""
    if hasattr(value, "fake_mode"):
        return id(value), 0  # without memory; it warns where it is asked for some
    try:
        storage = value.untyped_storage()
        return (str(value.device), storage.data_ptr() or id(value)), int(storage.nbytes())
    except Exception:  # an array, or a tensor without memory of its own (sparse, meta, wrapped)
        while _is_array(getattr(value, "base", None)):
            value = value.base
        if _is_array(value):
            return ("cpu", value.__array_interface__["data"][0]), int(value.nbytes)
        return id(value), int(getattr(value, "nbytes", 0))
