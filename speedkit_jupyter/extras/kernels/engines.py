"""Engines that compute attention: one SDPA call, blocks of queries, or FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from speedkit_jupyter.catalog.model_changes.compiled import compile_alone
from speedkit_jupyter.extras.kernels.patterns import MaskMod, Pattern, positions

# Biases of blocks are cached up to this size: all heads and queries, with the keys of the block.
KEPT_BYTES = 2**28


class Shape(NamedTuple):
    """Sizes of q (batch, heads, queries, …) and k (batch, key_heads, keys, …); dtype and device."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    dtype: torch.dtype
    device: torch.device


class AttentionInputs(NamedTuple):
    """Queries, keys and values; a `scale` of None means 1/√head_dim."""

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
        return torch.is_grad_enabled() and any(one.requires_grad for one in self[:3])


class ScoreIndices(NamedTuple):
    """Indices of scores: four tensors that broadcast to (batch, heads, queries, keys)."""

    batch: torch.Tensor
    head: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor


@dataclass
class QueryBlock:
    """A block of queries, and `runs` of keys that it sees, as ranges (first, end)."""

    at: ScoreIndices
    runs: list[tuple[int, int]]
    mask: torch.Tensor | None  # Booleans (True: visible), or a float bias; None if all are visible


@dataclass
class BlockLayout:
    """Blocks of `size` queries for each slice of the batch, and the `share` of computed scores."""

    size: int
    rows: list[tuple[slice, list[QueryBlock]]]
    share: float


def laid_out(pattern: Pattern, shape: Shape, size: int) -> BlockLayout:
    """Return blocks of `size` queries, per sample if masks differ; one block if all queries fit."""
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
    """Yield the blocks of samples `batch`; consecutive blocks with equal masks share one tensor."""
    numbers = partial(torch.arange, device=shape.device)
    head, before = numbers(0, shape.heads).view(1, -1, 1, 1), None
    for first in range(0, shape.queries, size):
        last = min(first + size, shape.queries)
        query = numbers(first, last).view(1, 1, -1, 1)
        key, runs, mask = numbers(0, shape.keys), [(0, shape.keys)], None
        if pattern.mask is not None:
            mask = seen(pattern.mask, ScoreIndices(batch, head, query, key.view(1, 1, 1, -1)))
            runs = _runs(mask, size)
            key = torch.cat([numbers(*run) for run in runs])
            mask = None if bool((mask := mask[..., key]).all()) else mask
        at = ScoreIndices(batch, head, query, key.view(1, 1, 1, -1))
        kept_bytes = shape.heads * shape.queries * key.numel() * shape.dtype.itemsize
        if pattern.score is not None and pattern.is_bias and kept_bytes <= KEPT_BYTES:
            mask = bias(pattern, at, mask, shape.dtype)
        if mask is not None and before is not None and mask.shape == before.shape:
            mask = before if torch.equal(mask, before) else mask
        before = mask
        yield QueryBlock(at, runs, mask)


def seen(mask: MaskMod, at: ScoreIndices) -> torch.Tensor:
    found = mask(*at)
    ones = (1, 1, at.query.numel(), at.key.numel())
    return found.expand(torch.broadcast_shapes(found.shape, ones))


def _runs(mask: torch.Tensor, size: int) -> list[tuple[int, int]]:
    """Return the ranges of keys that some query sees, in whole blocks; at least the first block."""
    keys = mask.shape[-1]
    seen = torch.nn.functional.pad(mask.flatten(0, -2).any(0), (0, -keys % size))
    runs: list[tuple[int, int]] = []
    for number in seen.view(-1, size).any(1).nonzero().flatten().tolist() or [0]:
        first, last = number * size, min((number + 1) * size, keys)
        if runs and runs[-1][1] == first:
            runs[-1] = runs[-1][0], last
        else:
            runs.append((first, last))
    return runs


def bias(
    pattern: Pattern, at: ScoreIndices, mask: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the bias that a pattern adds to scores; it is minus infinity for masked keys."""
    assert pattern.score is not None
    added = pattern.score(torch.zeros((), device=at.query.device), *at).to(dtype)
    return added if mask is None else added.masked_fill(~mask, -torch.inf)


def by_blocks(inputs: AttentionInputs, pattern: Pattern, layout: BlockLayout) -> torch.Tensor:
    """Return attention, computed for each block of queries with the keys that the block sees."""
    whole, rows, is_first = inputs[:3], list[torch.Tensor](), True
    for row, blocks in layout.rows:
        found = []
        for number, block in enumerate(blocks):
            first = number * layout.size
            queries = [(first, first + block.at.query.numel())]
            places = [(row, runs) for runs in (queries, block.runs, block.runs)]
            if inputs.is_learned:
                *parts, q, k, v = _Parts.apply(places, is_first, *whole)
                whole, is_first = (q, k, v), False
            else:
                parts = [*map(_taken, whole, places)]
            found.append(_attended(AttentionInputs._make([*parts, inputs.scale]), pattern, block))
        rows.append(_joined(found))
    return _joined(rows, 0)


# A slice of the batch, and ranges (first, end) of positions.
Place = tuple[slice, Sequence[tuple[int, int]]]


class _Parts(torch.autograd.Function):
    """Take a block's parts of q, k and v; return the parts, and q, k and v for the next block.

    The next block gets q, k and v from this block, so that all blocks add to one gradient. A plain
    slice would allocate a gradient of the whole tensor for each block. A part of a single range is
    a view that shares the version counter, so autograd detects in-place changes to the tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, places: Sequence[Place], is_first: bool, *whole: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.places, ctx.shapes = places, [one.shape for one in whole]
        ctx.set_materialize_grads(False)
        if is_first:  # so that autograd checks the tensors' versions, even if parts are copies
            ctx.save_for_backward(*whole)
        # Results are detached: autograd forbids in-place changes to views among several outputs.
        results = [one.detach() for one in (*map(_taken, whole, places), *whole)]
        needed = ctx.needs_input_grad[2:] * 2
        ctx.mark_non_differentiable(
            *(one for one, is_needed in zip(results, needed, strict=True) if not is_needed)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # raises an error if a tensor was changed in place
        return None, None, *map(_added, ctx.places, ctx.shapes, gradients[:3], gradients[3:])


def _taken(whole: torch.Tensor, place: Place) -> torch.Tensor:
    row, runs = place
    return _joined([whole[row, :, low:high] for low, high in runs])


def _added(
    place: Place, shape: torch.Size, part: torch.Tensor | None, others: torch.Tensor | None
) -> torch.Tensor | None:
    if part is None or (others is None and part.shape == shape):
        return others if part is None else part
    others = part.new_zeros(shape) if others is None else others
    row, runs = place
    lengths = [high - low for low, high in runs]
    for (low, _), one in zip(runs, part.split(lengths, 2), strict=True):
        others.narrow(0, row.start or 0, len(one)).narrow(2, low, one.shape[2]).add_(one)
    return others


def _joined(parts: list[torch.Tensor], dim: int = 2) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def at_once(inputs: AttentionInputs, pattern: Pattern) -> torch.Tensor:
    shape = inputs.shape
    if pattern.is_plain or 0 in shape[:5]:
        return fused(inputs, is_causal=pattern.is_causal)
    at = ScoreIndices(*positions(*shape[:2], *shape[3:5], device=shape.device))
    mask = None if pattern.mask is None else seen(pattern.mask, at)
    return _attended(inputs, pattern, QueryBlock(at, [], mask))


def _attended(inputs: AttentionInputs, pattern: Pattern, block: QueryBlock) -> torch.Tensor:
    mask = block.mask
    if not pattern.is_bias:
        return _scored(inputs, pattern, block)
    if pattern.score is not None and (mask is None or not mask.is_floating_point()):
        mask = bias(pattern, block.at, mask, inputs.q.dtype)
    return fused(inputs, mask)


def fused(
    inputs: AttentionInputs, mask: torch.Tensor | None = None, is_causal: bool = False
) -> torch.Tensor:
    q, k, v, scale = inputs
    is_grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(
        q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
    )


def _scored(inputs: AttentionInputs, pattern: Pattern, block: QueryBlock) -> torch.Tensor:
    """Return attention with scores changed by `pattern.score`, computed in float32 or wider."""
    assert pattern.score is not None
    q, k, v, scale = inputs
    batch, heads, queries, width = q.shape
    exact = torch.promote_types(q.dtype, torch.float32)
    lowest = torch.finfo(exact).min
    # torch.autocast raises an error for a type of device without autocast.
    kind = q.device.type if torch.amp.is_autocast_available(q.device.type) else "cpu"
    with torch.autocast(kind, enabled=False):
        scaled = q.to(exact) * (width**-0.5 if scale is None else scale)
        # Query heads that share a key head become rows of one matrix.
        together = scaled.reshape(batch, k.shape[1], -1, width)
        scores = (together @ k.to(exact).mT).view(batch, heads, queries, -1)
        scores = pattern.score(scores, *block.at)
        if block.mask is not None:
            scores = scores.masked_fill(~block.mask, -torch.inf)
        # The greatest score has weight 1, so a row's sum is 1 or more, or 0 if all keys are masked.
        weights = (scores - scores.detach().amax(-1, keepdim=True).clamp(min=lowest)).exp()
        total = weights.sum(-1, keepdim=True).clamp(min=1.0)
        found = weights.view(batch, k.shape[1], -1, scores.shape[-1]) @ v.to(exact)
        return (found.view(batch, heads, queries, -1) / total).to(q.dtype)


def compiled_flex(_: torch.device, shape: Shape | None) -> Callable[..., Any]:
    """Return FlexAttention, compiled at its first call; sizes are static unless `shape` is None."""
    from torch.nn.attention.flex_attention import flex_attention

    attend = lambda *args, **kwargs: flex_attention(*args, **kwargs)  # noqa: E731
    return compile_alone(attend, **({} if shape is None else {"dynamic": False}))


def block_mask(pattern: Pattern, shape: Shape) -> Any:
    """Return the BlockMask, per sample or head if the mask depends on it; None without a mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    if pattern.mask is None:
        return None
    by_row = pattern.seen(rows=shape.batch, device=shape.device).numel() > 1
    by_head = pattern.seen(heads=shape.heads, device=shape.device).numel() > 1
    return create_block_mask(
        pattern.mask, shape.batch if by_row else None, shape.heads if by_head else None,
        shape.queries, shape.keys, device=shape.device,
    )  # fmt: skip


def by_flex(inputs: AttentionInputs, pattern: Pattern, flex: Any, blocks: Any) -> torch.Tensor:
    q, k, v, scale = inputs
    if blocks is not None and pattern.mask is not None:
        blocks.mask_mod = pattern.mask  # the cached function may read tensors that have changed
    if not torch.is_grad_enabled():  # on CPUs, torch rejects requires_grad even in no_grad()
        q, k, v = q.detach(), k.detach(), v.detach()
    more = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    return flex(q, k, v, score_mod=pattern.score, block_mask=blocks, **more)  # type: ignore[no-any-return]
