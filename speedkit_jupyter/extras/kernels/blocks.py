"""Blocks of queries, each with the blocks of keys that it sees: what attention has to compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from speedkit_jupyter.extras.kernels.patterns import MaskMod, Pattern

# Biases that take more bytes than this for all blocks are computed at each call.
KEPT_BYTES = 2**28


class Shape(NamedTuple):
    """Of queries and keys: (batch, heads, queries, width) and (batch, key_heads, keys, width)."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    dtype: torch.dtype
    device: torch.device


class AttentionInputs(NamedTuple):
    """What attention is computed of; `scale` is 1/√width where it is None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float | None = None

    @property
    def shape(self) -> Shape:
        q, k = self.q.shape, self.k.shape
        return Shape(q[0], q[1], k[1], q[2], k[2], self.q.dtype, self.q.device)

    @property
    def is_learned(self) -> bool:
        """Return whether a backward pass may follow."""
        return torch.is_grad_enabled() and any(one.requires_grad for one in self[:3])


class ScoreIndices(NamedTuple):
    """Four tensors that broadcast to (batch, heads, queries, keys)."""

    batch: torch.Tensor
    head: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor


@dataclass
class QueryBlock:
    """Some queries, and the runs of keys that they see; `at` are the positions of both.

    `mask` is None where each sees all of these; else True for what is seen, or a `bias` to add,
    which is minus infinity elsewhere.
    """

    at: ScoreIndices
    runs: list[tuple[int, int]]
    mask: torch.Tensor | None


@dataclass
class BlockLayout:
    """The blocks of each slice of the batch; `share` is that of all scores that are computed."""

    size: int
    rows: list[tuple[slice, list[QueryBlock]]]
    share: float


def laid_out(pattern: Pattern, shape: Shape, size: int) -> BlockLayout:
    """Return the blocks of `size` queries. One block of all sees all keys in one run.

    Where the pattern differs between the rows of a batch, each row has blocks of its own.
    """
    if size >= shape.queries:
        size = max(shape.queries, shape.keys, 1)
    each = torch.arange(shape.batch, device=shape.device).view(-1, 1, 1, 1)
    is_alike = pattern.seen(rows=shape.batch, device=shape.device).numel() == 1
    every = [slice(None)]
    if size < shape.queries and not is_alike:
        every = [slice(row, row + 1) for row in range(shape.batch)]
    rows = [(row, [*_blocks(pattern, shape, size, each[row])]) for row in every]
    computed = sum(one.at.query.numel() * one.at.key.numel() for _, some in rows for one in some)
    return BlockLayout(size, rows, computed / max(len(rows) * shape.queries * shape.keys, 1))


def _blocks(pattern: Pattern, shape: Shape, size: int, batch: torch.Tensor) -> Iterator[QueryBlock]:
    """Yield the blocks of some rows of the batch. Blocks that are alike share a mask."""

    def numbers(first: int, last: int) -> torch.Tensor:
        return torch.arange(first, last, device=shape.device)

    head, before = numbers(0, shape.heads).view(1, -1, 1, 1), None
    for first in range(0, shape.queries, size):
        last = min(first + size, shape.queries)
        query = numbers(first, last).view(1, 1, -1, 1)
        low, high = _whole_blocks(pattern.span(first, last), size, shape.keys)
        key, runs, mask = numbers(low, high), [(low, high)], None
        if pattern.mask is not None:
            mask = seen(pattern.mask, ScoreIndices(batch, head, query, key.view(1, 1, 1, -1)))
            runs = _runs(mask, low, size)
            key = torch.cat([numbers(*run) for run in runs])
            mask = None if bool((mask := mask[..., key - low]).all()) else mask
        at = ScoreIndices(batch, head, query, key.view(1, 1, 1, -1))
        kept_bytes = shape.heads * shape.queries * key.numel() * shape.dtype.itemsize
        if pattern.score is not None and pattern.is_bias and kept_bytes <= KEPT_BYTES:
            mask = bias(pattern, at, mask, shape.dtype)
        if mask is not None and before is not None and mask.shape == before.shape:
            mask = before if torch.equal(mask, before) else mask
        before = mask
        yield QueryBlock(at, runs, mask)


def _whole_blocks(span: tuple[int, int], size: int, keys: int) -> tuple[int, int]:
    """Return where the blocks of keys begin and end that hold the span, at least one of them."""
    low = min(max(span[0], 0), max(keys - 1, 0)) // size * size
    return low, min(max(-(-span[1] // size) * size, low + size), keys)


def seen(mask: MaskMod, at: ScoreIndices) -> torch.Tensor:
    """Return True for what is seen, with as many queries and keys as `at`."""
    found = mask(*at)
    ones = (1, 1, at.query.numel(), at.key.numel())
    return found.expand(torch.broadcast_shapes(found.shape, ones))


def _runs(mask: torch.Tensor, low: int, size: int) -> list[tuple[int, int]]:
    """Return where the blocks of keys lie that some query sees, neighbours as one; at least one
    block, so that what sees nothing is zero, and has a gradient, as anything else.
    """
    keys = mask.shape[-1]
    seen = torch.nn.functional.pad(mask.flatten(0, -2).any(0), (0, -keys % size))
    runs: list[tuple[int, int]] = []
    for number in seen.view(-1, size).any(1).nonzero().flatten().tolist() or [0]:
        first, last = low + number * size, min(low + (number + 1) * size, low + keys)
        if runs and runs[-1][1] == first:
            runs[-1] = runs[-1][0], last
        else:
            runs.append((first, last))
    return runs


def bias(
    pattern: Pattern, at: ScoreIndices, mask: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return what a pattern adds to scores, minus infinity where nothing is seen."""
    assert pattern.score is not None
    nothing = torch.zeros((), device=at.query.device)
    added = pattern.score(nothing, *at).to(dtype)
    return added if mask is None else added.masked_fill(~mask, -torch.inf)
