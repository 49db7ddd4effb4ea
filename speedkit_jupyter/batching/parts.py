"""The arguments of a call, cut along their first dimension."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from speedkit_jupyter.support.exceptions import StepError

Key = int | str


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

    def part(self, first: int, last: int) -> Call:
        """The samples from `first` to before `last`."""
        return self._of(slice(first, min(last, self.length)))

    def spread(self, number: int) -> Call:
        """So many of all of them, at equal distances."""
        every = max(self.length // number, 1)
        return self._of(slice(0, every * number, every))

    def _of(self, samples: slice) -> Call:
        def cut(key: Key, value: Any) -> Any:
            return value if key in self.whole else _cut(value, self.length, samples)

        return replace(
            self,
            arguments=tuple(cut(at, value) for at, value in enumerate(self.arguments)),
            named={name: cut(name, value) for name, value in self.named.items()},
            length=len(range(self.length)[samples]),
        )

    def parts(self, size: int) -> Iterator[Call]:
        """One after another; the last may be smaller."""
        for first in range(0, self.length, size):
            yield self.part(first, first + size)


def length_of(value: Any) -> int | None:
    """The first dimension of the first tensor in it that has one."""
    import numpy as np
    import torch
    from torch.utils._pytree import tree_leaves

    kinds = (torch.Tensor, np.ndarray)
    leaves = (leaf for leaf in tree_leaves(_plain(value)) if isinstance(leaf, kinds))
    return next((len(leaf) for leaf in leaves if leaf.ndim), None)


def _plain(value: Any) -> Any:
    """A mapping of a library's own (transformers' BatchEncoding, say) as a dictionary."""
    return dict(value) if isinstance(value, Mapping) and type(value) is not dict else value


def _cut(value: Any, length: int, samples: slice) -> Any:
    """What holds a value for each sample is cut; containers are looked into."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor | np.ndarray):
        return value[samples] if value.ndim and len(value) == length else value
    if isinstance(value, Mapping):
        return {key: _cut(one, length, samples) for key, one in value.items()}
    if isinstance(value, list | tuple):
        holds_tensors = length_of(value) is not None
        if len(value) == length and not holds_tensors:  # texts, say
            return value[samples]
        cut = [_cut(one, length, samples) for one in value]
        if isinstance(value, tuple):
            return type(value)(*cut) if hasattr(value, "_fields") else tuple(cut)
        return cut
    return value
