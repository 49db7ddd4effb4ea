"""Which tensors and arrays an object keeps alive, and by which way."""

from __future__ import annotations

import gc
import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CellType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

# More objects are not looked at, and smaller arrays do not matter.
MOST, LEAST_BYTES = 2_000_000, 1 << 16
# Where a module keeps what it calls otherwise.
OF_MODULES = ("_parameters", "_buffers", "_modules")


@dataclass
class Reach:
    """What lies behind `roots`, by identity. `before` is through what each was reached."""

    found: dict[int, Any] = field(default_factory=dict)
    before: dict[int, Any] = field(default_factory=dict)

    def values(self) -> list[Any]:
        """Tensors and large arrays."""
        return [value for value in self.found.values() if is_large(value)]

    def way(self, value: Any) -> str:
        """How code would come to it, from the root on: `.hooks[0]`, ` (its x)` of a closure."""
        chain = [value]
        while id(chain[-1]) in self.before:
            chain.append(self.before[id(chain[-1])])
        chain.reverse()
        return "".join(_words(chain))


def reached(roots: Iterable[Any], apart: Iterable[Any] = ()) -> Reach:
    """Everything that the roots keep alive, but for modules, and what is behind objects `apart`."""
    reach, seen = Reach(), {id(one) for one in apart} | set(_spaces())
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
    """Whether it is a tensor, or an array that owns more than a little memory."""
    kind = type(value)
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return True
    return _is_array(value) and value.nbytes >= LEAST_BYTES


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), numpy.ndarray)


def size(values: Iterable[Any]) -> int:
    """Bytes behind tensors and arrays, each piece of memory counted once."""
    pieces: dict[object, int] = {}
    for value in values:
        place, number = _piece(value)
        pieces[place] = max(number, pieces.get(place, 0))
    return sum(pieces.values())


def pieces_of(values: Iterable[Any]) -> set[object]:
    """The pieces of memory."""
    return {_piece(value)[0] for value in values}


def without(values: Iterable[Any], pieces: set[object]) -> list[Any]:
    """Those that lie in none of these pieces of memory."""
    return [value for value in values if _piece(value)[0] not in pieces]


def _is_fake(value: Any) -> bool:
    """A tensor of torch.compile's without memory, which warns where it is asked for some."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(value, fakes.FakeTensor)


def _piece(value: Any) -> tuple[object, int]:
    if _is_fake(value):
        return id(value), 0
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
    """Whether a tensor holds others: its gradient, attributes."""
    return bool(getattr(value, "__dict__", None)) or hasattr(value, "grad_fn")


def _spaces() -> Iterator[int]:
    """The namespaces of modules, which lead everywhere."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            yield id(module.__dict__)


def _words(chain: Sequence[Any]) -> Iterator[str]:
    """From the first to the last. Between a function and the cell of its closure lies a tuple."""
    for at, (holder, part) in enumerate(itertools.pairwise(chain)):
        if isinstance(part, CellType):
            function = chain[at - 1]
            if isinstance(function, FunctionType):
                yield _of_closure(function, part)
        elif not isinstance(holder, CellType | TracebackType | FunctionType):
            yield _word(holder, part)


def _of_closure(function: FunctionType, cell: CellType) -> str:
    cells = function.__closure__ or ()
    pairs = zip(function.__code__.co_freevars, cells, strict=False)
    name = next((name for name, one in pairs if one is cell), "")
    return f" ({name} in the closure of {function.__name__})"


def _word(holder: Any, part: Any) -> str:
    if isinstance(holder, FrameType):
        names = [name for name, value in holder.f_locals.items() if value is part]
        return f" ({names[0]} in {holder.f_code.co_name})" if names else ""
    if isinstance(holder, dict):
        key = next((key for key, value in dict.items(holder) if value is part), None)
        if isinstance(key, str) and key.isidentifier():
            return "" if key in OF_MODULES else f".{key}"
        return "" if key is None else f"[{key!r:.30}]"
    if isinstance(holder, list | tuple):
        at = next((at for at, value in enumerate(holder) if value is part), None)
        return "" if at is None else f"[{at}]"
    return ""
