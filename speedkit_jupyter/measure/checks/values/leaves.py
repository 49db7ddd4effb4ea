"""What can be compared in a result, wherever it lies in it: numbers, and all that is exact."""

from __future__ import annotations

import dataclasses
import enum
import numbers
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.checks.values.plain_tensors import plain
from speedkit_jupyter.support.torch_private import tree_leaves

if TYPE_CHECKING:
    import torch

# An evenly spaced sample of a larger tensor is compared: it tells as much, and is quick to copy.
MOST_ELEMENTS = 2**20
# Containers within containers; what lies deeper is not looked into.
DEEPEST = 8


@dataclass
class Leaves:
    """The parts of results by their place in it, such as `logits` or `hidden.0`.

    `numbers` are detached floating-point tensors, complex ones as pairs, with their `dtypes`;
    `integers` are int64 tensors; `words` all else that can only be equal. `unknown` names the
    types in which nothing was found.
    """

    numbers: dict[str, torch.Tensor] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    integers: dict[str, torch.Tensor] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def add(self, value: Any, name: str = "") -> Leaves:
        """Add what can be compared in a value that is called `name`."""
        for inner, part in _parts(value, DEEPEST, frozenset()):
            self._add(".".join(filter(None, (name, inner))), part)
        return self

    def _add(self, name: str, value: Any) -> None:
        import torch

        while name in self.numbers or name in self.integers or name in self.words:
            name += "'"
        if isinstance(value, numbers.Integral):  # bool too
            number = int(value)
            value = torch.tensor(number if -(2**63) <= number < 2**63 else number % 2**63)
        elif isinstance(value, numbers.Number):
            try:
                pair = complex(value)  # type: ignore[call-overload]
                value = torch.tensor([pair.real, pair.imag], dtype=torch.float64)
            except TypeError:  # of a library's own kind
                value = str(value)
        if isinstance(value, torch.Tensor):
            self._add_tensor(name, value)
        elif isinstance(value, _Unknown):
            self.unknown.append(value.name)
        else:
            self.words[name] = str(value)

    def _add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        import torch

        values = plain(tensor)
        if values is None:
            self.unknown.append(f"{type(tensor).__name__} without values")
            return
        kept = sampled(values)
        if kept.is_floating_point():
            self.numbers[name] = kept
            self.dtypes[name] = str(tensor.dtype).removeprefix("torch.")
        else:
            self.integers[name] = kept.to("cpu", torch.int64)


@dataclass(frozen=True)
class _Unknown:
    name: str


def sampled(values: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor, or an evenly spaced sample; complex numbers as pairs."""
    import torch

    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.is_floating_point() and values.element_size() == 1:  # has hardly any operations
        values = values.float()
    if values.numel() > MOST_ELEMENTS:
        values = values.flatten()[:: values.numel() // MOST_ELEMENTS | 1]
    return values


def _parts(value: Any, depth: int, above: frozenset[int]) -> Iterator[tuple[str, Any]]:
    """Yield tensors, numbers and strings in containers and attributes, each with its name."""
    import torch

    if value is None or isinstance(value, (numbers.Number, str, bytes, torch.Tensor)):
        if value is not None:
            yield "", value
        return
    if id(value) in above or depth == 0:
        return
    if (array := _array(value)) is not None:
        yield "", array
        return
    empty = True
    for name, item in _inside(value):
        for inner, part in _parts(item, depth - 1, above | {id(value)}):
            empty = False
            yield ".".join(filter(None, (name, inner))), part
    if empty and not isinstance(value, (list, tuple, Mapping, set, frozenset)):
        yield "", _Unknown(type(value).__name__)


def _inside(value: Any) -> Iterable[tuple[str, Any]]:
    import torch

    if isinstance(value, Mapping):
        keys = [("", key) for key in value if isinstance(key, str)]
        return [*keys, *((str(key), item) for key, item in value.items())]
    if isinstance(value, (set, frozenset)):  # a set of results has no order of its own
        return [("", item) for item in sorted(value, key=_rank)]
    if isinstance(value, (list, tuple)):
        count = range(len(value) if len(value) > 1 else 0)
        return zip(getattr(value, "_fields", [*map(str, count), ""]), value, strict=False)
    leaves = tree_leaves(value)
    if not (len(leaves) == 1 and leaves[0] is value):  # a container that torch knows
        return [("", leaf) for leaf in leaves]
    if isinstance(value, enum.Enum):
        return [("", value.name)]
    foreign = (type, torch.nn.Module, torch.optim.Optimizer, torch.Generator)
    if callable(value) or isinstance(value, foreign):
        return []
    if dataclasses.is_dataclass(value):
        names = [member.name for member in dataclasses.fields(value)]
    else:
        slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
        names = [name for slot in slots for name in ((slot,) if isinstance(slot, str) else slot)]
        names += list(getattr(value, "__dict__", ()))
    return [(n, getattr(value, n)) for n in names if not n.startswith("__") and hasattr(value, n)]


def _rank(value: Any) -> tuple[float, str]:
    """Order numbers by size: by their digits, rounding would put them in another order."""
    return (float(value), "") if isinstance(value, numbers.Real) else (float("inf"), repr(value))


def _array(value: Any) -> Any:
    """Return a NumPy array or scalar as a tensor, or as text; None for anything else."""
    import torch

    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    array = numpy.asarray(value)
    if array.dtype.kind not in "fciub":
        return repr(array.tolist())
    wide = array.astype("int64") if array.dtype.kind in "iub" else array
    return torch.from_numpy(numpy.array(wide, dtype=wide.dtype.newbyteorder("=")))
