"""What can be compared in a result, wherever it lies in it: numbers, and all that is exact."""

from __future__ import annotations

import dataclasses
import enum
import numbers
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.checks.plain import or_nothing, plain

if TYPE_CHECKING:
    import torch

# Of a larger tensor an evenly spaced sample is kept; of one among very many, a smaller one.
MOST_ELEMENTS, FEW_ELEMENTS = 2**22, 2**12
DEEPEST = 8


@dataclass
class Leaves:
    """`numbers` are tensors in float64 on the CPU, in their shape (or a sample, flat).

    `names` say where each of them lies in the result: `logits`, `hidden.0`; empty where it is all.
    `exact` are whole numbers (int64 tensors), `words` everything else that can only be equal.
    `unknown` names the types in which nothing was found. Of a tensor `most` elements are kept.
    """

    numbers: list[torch.Tensor] = field(default_factory=list)
    exact: list[torch.Tensor] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    most: int = MOST_ELEMENTS

    def __bool__(self) -> bool:
        return bool(self.numbers or self.exact or self.words)

    def add(self, value: Any) -> None:
        """What can be compared in this value."""
        for name, one in _parts(value, DEEPEST, set()):
            before = len(self.numbers)
            self._add(one)
            self.names += [name] * (len(self.numbers) - before)

    def _add(self, one: Any) -> None:
        import torch

        if isinstance(one, torch.Tensor):
            if plain(one) is None:
                self.unknown.append(f"{type(one).__name__} without values")
                return
            kept = sampled(one, self.most)
            (self.numbers if kept.is_floating_point() else self.exact).append(kept)
        elif isinstance(one, numbers.Integral):  # bool too
            self.exact.append(torch.tensor(int(one) % 2**63))
        elif isinstance(one, numbers.Complex):
            self.numbers.append(sampled(torch.tensor(one, dtype=torch.complex128)))
        elif isinstance(one, _Unknown):
            self.unknown.append(one.name)
        else:
            self.words.append(str(one))


@dataclass(frozen=True)
class _Unknown:
    name: str


def of(values: Iterable[Any], most: int = MOST_ELEMENTS) -> Leaves:
    """All that can be compared in these values."""
    found = Leaves(most=most)
    for value in values:
        found.add(value)
    return found


def sampled(tensor: torch.Tensor, most: int = MOST_ELEMENTS) -> torch.Tensor:
    """On the CPU: in float64, or int64 where its values are whole; complex as pairs.

    Of a tensor with more than `most` elements an evenly spaced sample.
    """
    import torch

    found = or_nothing(tensor)
    if found.is_complex():
        found = torch.view_as_real(found.resolve_conj())
    if found.numel() > most:
        found = found.flatten()[:: found.numel() // most | 1]
    dtype = torch.float64 if found.is_floating_point() else torch.int64
    return found.to("cpu", dtype, copy=True)


def _parts(value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Tensors, numbers and strings: in containers that torch knows, and behind attributes.

    Each with the name that it has in the value.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    if value is None or isinstance(value, (numbers.Number, str, bytes, torch.Tensor)):
        if value is not None:
            yield "", value
        return
    if id(value) in seen or depth == 0:
        return
    seen = {*seen, id(value)}
    array = _array(value)
    if array is not None:
        yield "", array
        return
    if isinstance(value, Mapping):  # in the order of the keys: a set of results has no other
        words = [key for key in value if isinstance(key, str)]
        inside: Iterable[Any] = [*words, *value.values()]
    elif isinstance(value, (set, frozenset)):
        inside = sorted(value, key=_rank)
    elif isinstance(value, (list, tuple)):
        inside = value
    else:
        found = tree_leaves(value)
        inside = found if not (len(found) == 1 and found[0] is value) else _attributes(value)
    empty = True
    inside = list(inside)
    for name, one in zip(_names(value, len(inside)), inside, strict=True):
        for inner, part in _parts(one, depth - 1, seen):
            empty = False
            yield ".".join(filter(None, (name, inner))), part
    if empty and not isinstance(value, (list, tuple, Mapping, set, frozenset)):
        yield "", _Unknown(type(value).__name__)


def _names(value: Any, count: int) -> list[str]:
    """What the parts of a value are called in it; the last of them where there are more."""
    if isinstance(value, Mapping):
        found = [str(one) for one in value]
    elif isinstance(value, (list, tuple)):
        found = list(getattr(value, "_fields", map(str, range(count if count > 1 else 0))))
    elif dataclasses.is_dataclass(value):
        found = [one.name for one in dataclasses.fields(value)]
    else:
        found = [str(one) for one in getattr(value, "__dict__", ())]
    return ([""] * count + found)[-count:] if count else []


def _rank(value: Any) -> tuple[float, str]:
    """Numbers by their size: by their digits, rounding would put them in another order."""
    return (float(value), "") if isinstance(value, numbers.Real) else (float("inf"), repr(value))


def _array(value: Any) -> Any:
    """A numpy array or scalar as a tensor; None for anything else."""
    import torch

    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    array = numpy.asarray(value)
    if array.dtype.kind in "fciub":
        wide = {"u": "int64", "b": "int64", "i": "int64"}.get(array.dtype.kind)
        fits = array.astype(wide) if wide else array
        return torch.from_numpy(numpy.array(fits, dtype=fits.dtype.newbyteorder("=")))
    return repr(array.tolist())


def _attributes(value: Any) -> list[Any]:
    """What a plain object holds; not what belongs to modules, optimizers, functions and files."""
    import torch

    if isinstance(value, enum.Enum):
        return [value.name]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, one.name, None) for one in dataclasses.fields(value)]
    foreign = (type, torch.nn.Module, torch.optim.Optimizer, torch.Generator)
    if isinstance(value, types.FunctionType):
        return _enclosed(value)
    if callable(value) or isinstance(value, foreign):
        return []
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    held = [getattr(value, name) for name in slots if hasattr(value, name)]
    return [*held, *getattr(value, "__dict__", {}).values()]


def _enclosed(function: types.FunctionType) -> list[Any]:
    """The plain values that a function brings along: of its closure, and its defaults."""
    import torch

    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not filled yet
            found.append(cell.cell_contents)
    plain = (numbers.Number, str, bytes, torch.Tensor, list, tuple, dict, set, frozenset)
    return [one for one in found if isinstance(one, plain)]


def _slots(kind: type) -> list[str]:
    found = kind.__dict__.get("__slots__", ())
    names = [found] if isinstance(found, str) else list(found)
    return [name for name in names if not name.startswith("__")]
