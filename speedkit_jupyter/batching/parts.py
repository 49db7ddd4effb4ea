"""The arguments of a call, cut along their first dimension."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any

from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.samples import are_alike, cut, length_of

Key = int | str
# Objects within an argument (a cache, its layers, their tensors): so far writes are looked for.
DEPTH = 6
WRITES = (
    "the call writes to its arguments (a key-value cache, say), which each part would do again: "
    "micro_batch can't split it"
)


@dataclass(frozen=True)
class Call:
    """Arguments of which some hold a value for each of `length` samples. Those whose position or
    name is `whole` are never cut.
    """

    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    length: int
    whole: Collection[Key] = ()

    @classmethod
    def of(
        cls, arguments: tuple[Any, ...], named: Mapping[str, Any], whole: Collection[Key] = ()
    ) -> Call:
        """The length is that of the first tensor's first dimension. Raises StepError without."""
        given: dict[Key, Any] = dict(enumerate(arguments))
        given.update((name, value) for name, value in named.items())
        length = next(
            (found for key, value in given.items() if key not in whole
             and (found := length_of(value)) is not None), None,
        )  # fmt: skip
        if length is None:
            raise StepError("there is no tensor in the arguments whose first dimension is a batch")
        return cls(arguments, dict(named), length, whole)

    @property
    def is_alike(self) -> bool:
        """Whether all samples are the same, which proves nothing."""
        return are_alike([self.arguments, dict(self.named)], self.length, slice(None))

    def part(self, first: int, last: int) -> Call:
        """The samples from `first` to before `last`."""
        return self._of(slice(first, min(last, self.length)))

    def spread(self, number: int) -> Call:
        """So many of all of them, at equal distances."""
        every = max(self.length // number, 1)
        return self._of(slice(0, every * number, every))

    def _of(self, samples: slice) -> Call:
        def part(key: Key, value: Any) -> Any:
            return value if key in self.whole else cut(value, self.length, samples)

        return replace(
            self,
            arguments=tuple(part(at, value) for at, value in enumerate(self.arguments)),
            named={name: part(name, value) for name, value in self.named.items()},
            length=len(range(self.length)[samples]),
        )

    def run(self, function: Callable[..., Any]) -> Any:
        """Call the function with these. Raises StepError where it writes to one of them."""
        before = _state([self.arguments, self.named], DEPTH)
        result = function(*self.arguments, **self.named)
        if _state([self.arguments, self.named], DEPTH) != before:
            raise StepError(WRITES)
        return result

    def parts(self, size: int) -> Iterator[Call]:
        """One after another; the last may be smaller."""
        for first in range(0, self.length, size):
            yield self.part(first, first + size)


def _state(value: Any, depth: int) -> Any:
    """What tells a write: which objects lie where, and how often each tensor was written to."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return id(value), hash(value.tobytes()) if value.dtype != object else None
    if isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple | set):
        return [_state(part, depth) for part in value]
    inside = getattr(value, "__dict__", None)
    if not isinstance(inside, dict) or isinstance(value, type | FunctionType | ModuleType):
        return id(value)
    if depth == 0 or isinstance(value, torch.nn.Module):
        return id(value)
    return id(value), _state(inside, depth - 1)
