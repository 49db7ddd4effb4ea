"""Which tensors and arrays an object keeps alive, and by which way."""

from __future__ import annotations

import gc
import itertools
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import CellType, FrameType, ModuleType
from typing import Any

# More objects are not looked at, and smaller arrays do not matter.
MOST, LEAST_BYTES = 2_000_000, 1 << 16
# Where an nn.Module keeps what code finds by attribute.
OF_MODULES = ("_parameters", "_buffers", "_modules")


@dataclass
class Reach:
    """What lies behind `roots`, by id. `before` is through what each was reached."""

    found: dict[int, Any] = field(default_factory=dict)
    before: dict[int, Any] = field(default_factory=dict)

    def values(self) -> list[Any]:
        """Return tensors and large arrays."""
        return [value for value in self.found.values() if is_large(value)]

    def way(self, value: Any) -> str:
        """Return how code would come to it from the root: `.hooks[0]`, ` (x in fails)`."""
        chain = [value]
        while id(chain[-1]) in self.before:
            chain.append(self.before[id(chain[-1])])
        chain.reverse()
        return "".join(map(_word, chain, chain[1:]))


def reached(roots: Iterable[Any], apart: Iterable[Any] = ()) -> Reach:
    """Return what the roots keep alive, without modules and what is behind the objects `apart`."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    reach, seen = Reach(), set(map(id, itertools.chain(apart, map(vars, modules))))
    waiting: deque[Any] = deque()
    for root in roots:
        if id(root) not in seen:
            seen.add(id(root))
            reach.found[id(root)] = root
            waiting.append(root)
    while waiting and len(seen) < MOST:
        holder = waiting.popleft()
        if isinstance(holder, ModuleType | type) or (is_large(holder) and not _has_parts(holder)):
            continue
        for part in gc.get_referents(holder):
            if id(part) not in seen and not isinstance(part, ModuleType):
                seen.add(id(part))
                reach.found[id(part)], reach.before[id(part)] = part, holder
                if gc.is_tracked(part) or is_large(part):
                    waiting.append(part)
    return reach


def is_large(value: Any) -> bool:
    """Return whether it is a tensor, or an array of more than a little memory."""
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(type(value), torch.Tensor):
        return True
    return _is_array(value) and value.nbytes >= LEAST_BYTES


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


def without(values: Iterable[Any], others: Iterable[Any]) -> list[Any]:
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


def _has_parts(value: Any) -> bool:
    """Return whether a tensor holds others: its gradient, attributes."""
    return bool(getattr(value, "__dict__", None)) or hasattr(value, "grad_fn")


def _word(holder: Any, part: Any) -> str:
    """Return what leads from an object to the next one."""
    if isinstance(holder, FrameType):
        names = [name for name, value in holder.f_locals.items() if value is part]
        return f" ({names[0]} in {holder.f_code.co_name})" if names else ""
    if isinstance(holder, dict):
        key = next((key for key, value in dict.items(holder) if value is part), None)
        if isinstance(key, str) and key.isidentifier():
            return "" if key in OF_MODULES else f".{key}"
        return "" if key is None else f"[{key!r:.30}]"
    if isinstance(holder, list | tuple) and not isinstance(part, CellType):
        return next((f"[{n}]" for n, value in enumerate(holder) if value is part), "")
    return ""
