"""What logits are made of, before anybody has computed them; and what views make of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Source:
    """A linear layer's `features` (… x width), `weight` (classes x width) and `bias`.

    `dtype` is the logits' own, `cast` the one that the layer computes in (autocast's, or that of
    its weight); `at` is the dimension of the classes, 1 or the last one. The loss is computed in
    `chunks`, and `tell` learns of each why it was not; "" where it was.
    """

    features: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    cast: torch.dtype
    chunks: int
    tell: Callable[[str], None]
    at: int = -1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the logits."""
        before = [*self.features.shape[:-1]]
        before.insert(len(before) if self.at == -1 else self.at, len(self.weight))
        return tuple(before)

    @property
    def parts(self) -> list[torch.Tensor]:
        """Features, weight, and the bias where there is one."""
        return [self.features, self.weight, *([] if self.bias is None else [self.bias])]

    def plain(self) -> torch.Tensor:
        """The layer's result, with its graph."""
        import torch
        from torch.nn import functional

        with torch.enable_grad(), torch.autocast(self.features.device.type, enabled=False):
            found = functional.linear(*(part.to(self.cast) for part in self.parts)).to(self.dtype)
            return found if self.at == -1 else found.movedim(-1, self.at)

    def gradients(self, gradient: Any, wanted: Sequence[bool]) -> list[Any]:
        """Of the parts that are `wanted`, by that of the result; None for the others.

        By hand, since what autograd computes calls the hooks of the parts, which are called again
        when these are theirs.
        """
        grad = (gradient if self.at == -1 else gradient.movedim(self.at, -1)).to(self.cast)
        features, weight = (part.to(self.cast) for part in self.parts[:2])
        rows = grad.flatten(0, -2)
        makers = (
            lambda: grad @ weight,
            lambda: rows.T @ features.flatten(0, -2),
            lambda: rows.sum(0),
        )
        return [
            make().to(part.dtype) if is_wanted else None
            for part, make, is_wanted in zip(self.parts, makers, wanted, strict=False)
        ]


@cache
def views() -> Mapping[Any, Callable[..., Source | None]]:
    """What torch's functions make of a source; None where that is no source any more."""
    import torch

    tensor = torch.Tensor
    return {
        tensor.view: _reshaped,
        tensor.reshape: _reshaped,
        torch.reshape: _reshaped,
        tensor.flatten: _flattened,
        torch.flatten: _flattened,
        tensor.__getitem__: _chosen,
        tensor.transpose: _transposed,
        torch.transpose: _transposed,
        tensor.permute: _permuted,
        torch.permute: _permuted,
        tensor.contiguous: _as_it_is,
        tensor.float: _floated,
        tensor.to: _moved,
    }


def _reshaped(source: Source, *shape: Any) -> Source | None:
    """Where the classes stay the last dimension."""
    wanted = _listed(shape)
    if source.at != -1 or not wanted or not all(isinstance(size, int) for size in wanted):
        return None
    *before, last = wanted
    total, known = source.features.shape[:-1].numel(), 1
    for size in before:
        known *= size
    if last == -1 and -1 not in before and known == total:
        last = len(source.weight)
    if last != len(source.weight):
        return None
    return replace(source, features=source.features.reshape(*before, source.features.shape[-1]))


def _flattened(source: Source, start_dim: int = 0, end_dim: int = -1) -> Source | None:
    dims = source.features.ndim
    start, end = start_dim % dims, end_dim % dims
    if source.at != -1 or end >= dims - 1:
        return None
    return replace(source, features=source.features.flatten(start, end))


def _chosen(source: Source, index: Any) -> Source | None:
    """Some samples or positions, with all of their classes."""
    import torch

    index = index if isinstance(index, tuple) else (index,)
    dims = source.features.ndim
    kinds = (int, slice, type(...), torch.Tensor)
    if source.at != -1 or not all(isinstance(one, kinds) for one in index):
        return None
    taken = sum(_dims_of(one) for one in index)
    missing = [slice(None)] * (dims - taken)
    places = [at for at, one in enumerate(index) if one is ...]
    at = places[0] if places else len(index)
    index = (*index[:at], *missing, *index[at + len(places) :])
    if len(places) > 1 or not isinstance(index[-1], slice) or index[-1] != slice(None):
        return None
    return replace(source, features=source.features[index])


def _dims_of(one: Any) -> int:
    """How many dimensions a part of an index is about."""
    import torch

    if one is ...:
        return 0
    is_mask = isinstance(one, torch.Tensor) and one.dtype == torch.bool
    return one.ndim if is_mask else 1


def _transposed(source: Source, dim0: int, dim1: int) -> Source | None:
    dims = source.features.ndim
    if source.at == -1 and dims == 3 and {dim0 % dims, dim1 % dims} == {1, 2}:
        return replace(source, at=1)
    return None


def _permuted(source: Source, *dims: Any) -> Source | None:
    order, number = _listed(dims), source.features.ndim
    classes_second = [0, number - 1, *range(1, number - 1)]
    if source.at == -1 and number > 2 and [dim % number for dim in order] == classes_second:
        return replace(source, at=1)
    return None


def _as_it_is(source: Source) -> Source:
    return source


def _floated(source: Source) -> Source:
    import torch

    return replace(source, dtype=torch.float32)


def _moved(source: Source, to: Any) -> Source | None:
    import torch

    if isinstance(to, torch.dtype):
        return replace(source, dtype=to) if to in (torch.float32, torch.float64) else None
    if isinstance(to, str | torch.device):
        return source if torch.device(to) == source.weight.device else None
    return None


def _listed(given: tuple[Any, ...]) -> list[Any]:
    """Sizes as torch takes them: one by one, or as a sequence."""
    return [*given[0]] if len(given) == 1 and not isinstance(given[0], int) else [*given]
