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

from speedkit_jupyter.measure.checks.values.plain_tensors import or_nothing, plain

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
        for name, part in _parts(value, DEEPEST, set()):
            before = len(self.numbers)
            self._add(part)
            self.names += [name] * (len(self.numbers) - before)

    def _add(self, value: Any) -> None:
        import torch

        if isinstance(value, torch.Tensor):
            if plain(value) is None:
                self.unknown.append(f"{type(value).__name__} without values")
                return
            kept = sampled(value, self.most)
            (self.numbers if kept.is_floating_point() else self.exact).append(kept)
        elif isinstance(value, numbers.Integral):  # bool too
            self.exact.append(torch.tensor(_in_int64(int(value))))
        elif isinstance(value, numbers.Complex):
            self.numbers.append(sampled(torch.tensor(complex(value), dtype=torch.complex128)))
        elif isinstance(value, _Unknown):
            self.unknown.append(value.name)
        else:
            self.words.append(str(value))


@dataclass(frozen=True)
class _Unknown:
    name: str


def of(values: Iterable[Any], most: int = MOST_ELEMENTS) -> Leaves:
    """All that can be compared in these values."""
    leaves = Leaves(most=most)
    for value in values:
        leaves.add(value)
    return leaves


def sampled(tensor: torch.Tensor, most: int = MOST_ELEMENTS) -> torch.Tensor:
    """On the CPU: in float64, or int64 where its values are whole; complex as pairs.

    Of a tensor with more than `most` elements an evenly spaced sample.
    """
    import torch

    values = or_nothing(tensor)
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.numel() > most:
        values = values.flatten()[:: values.numel() // most | 1]
    dtype = torch.float64 if values.is_floating_point() else torch.int64
    return values.to("cpu", dtype, copy=True)


def _in_int64(value: int) -> int:
    """The same, wherever it fits."""
    return value if -(2**63) <= value < 2**63 else value % 2**63


def _parts(value: Any, depth: int, ids: set[int]) -> Iterator[tuple[str, Any]]:
    """Tensors, numbers and strings: in containers that torch knows, and behind attributes.

    Each with the name that it has in the value.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    if value is None or isinstance(value, (numbers.Number, str, bytes, torch.Tensor)):
        if value is not None:
            yield "", value
        return
    if id(value) in ids or depth == 0:
        return
    ids = {*ids, id(value)}
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
        leaves = tree_leaves(value)
        inside = leaves if not (len(leaves) == 1 and leaves[0] is value) else _attributes(value)
    empty = True
    inside = list(inside)
    for name, item in zip(_names(value, len(inside)), inside, strict=True):
        for inner, part in _parts(item, depth - 1, ids):
            empty = False
            yield ".".join(filter(None, (name, inner))), part
    if empty and not isinstance(value, (list, tuple, Mapping, set, frozenset)):
        yield "", _Unknown(type(value).__name__)


def _names(value: Any, count: int) -> list[str]:
    """What the parts of a value are called in it; the last of them where there are more."""
    if isinstance(value, Mapping):
        names = [str(key) for key in value]
    elif isinstance(value, (list, tuple)):
        names = list(getattr(value, "_fields", map(str, range(count if count > 1 else 0))))
    elif dataclasses.is_dataclass(value):
        names = [member.name for member in dataclasses.fields(value)]
    else:
        names = [str(name) for name in getattr(value, "__dict__", ())]
    return ([""] * count + names)[-count:] if count else []


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
        return [getattr(value, member.name, None) for member in dataclasses.fields(value)]
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

    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not filled yet
            values.append(cell.cell_contents)
    plain = (numbers.Number, str, bytes, torch.Tensor, list, tuple, dict, set, frozenset)
    return [value for value in values if isinstance(value, plain)]


def _slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if not name.startswith("__")]
