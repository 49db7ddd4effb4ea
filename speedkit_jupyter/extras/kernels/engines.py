"""Three ways to compute attention: by blocks of queries, all at once, or by FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from speedkit_jupyter.catalog.properties.compiled import compile_alone
from speedkit_jupyter.extras.kernels.blocks import (
    AttentionInputs,
    BlockLayout,
    QueryBlock,
    ScoreIndices,
    Shape,
    bias,
    seen,
)
from speedkit_jupyter.extras.kernels.patterns import Pattern, positions
from speedkit_jupyter.torchglue.private import can_hook_saved_tensors

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def by_blocks(inputs: AttentionInputs, pattern: Pattern, layout: BlockLayout) -> torch.Tensor:
    """Return attention, for each block of queries with the keys that it sees."""
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
            with _copies_remade(parts, whole, places):
                found.append(
                    _attended(AttentionInputs._make([*parts, inputs.scale]), pattern, block)
                )
        rows.append(_joined(found))
    return _joined(rows, 0)


# Rows of the batch, and runs of positions.
Place = tuple[slice, Sequence[tuple[int, int]]]


class _Parts(torch.autograd.Function):
    """Takes a part of each tensor; returns the parts, and the tensors for the next block.

    The tensors go from block to block, so that on the way back all blocks add to one gradient:
    that of a slice would be as large as the whole. A part of one run is no copy, and shares the
    count of writes: autograd sees where the whole is changed in place.
    """

    @staticmethod
    def forward(
        ctx: Any, places: Sequence[Place], is_first: bool, *whole: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.places, ctx.shapes = places, [one.shape for one in whole]
        ctx.set_materialize_grads(False)
        if is_first:  # for autograd to compare their counts, also where a part is a copy
            ctx.save_for_backward(*whole)
        # A view among several results could not say what has changed it.
        results = [one.detach() for one in (*map(_taken, whole, places), *whole)]
        needed = ctx.needs_input_grad[2:] * 2
        ctx.mark_non_differentiable(
            *(one for one, is_needed in zip(results, needed, strict=True) if not is_needed)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # raises where one was changed in place
        return None, None, *map(_added, ctx.places, ctx.shapes, gradients[:3], gradients[3:])


def _taken(whole: torch.Tensor, place: Place) -> torch.Tensor:
    row, runs = place
    return _joined([whole[row, :, low:high] for low, high in runs])


def _added(
    place: Place, shape: torch.Size, part: torch.Tensor | None, others: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the gradient of the whole: that of a part, added to the `others`."""
    if part is None or (others is None and part.shape == shape):
        return others if part is None else part
    others = part.new_zeros(shape) if others is None else others
    row, runs = place
    lengths = [high - low for low, high in runs]
    for (low, _), one in zip(runs, part.split(lengths, 2), strict=True):
        others.narrow(0, row.start or 0, len(one)).narrow(2, low, one.shape[2]).add_(one)
    return others


def _copies_remade(
    parts: Sequence[torch.Tensor], whole: Sequence[torch.Tensor], places: Sequence[Place]
) -> AbstractContextManager[object]:
    """Keep no copies of several runs for the backward pass: they are made again there."""
    # torch keeps these hooks as long as what they packed: they must not hold the copies.
    made = {
        _layout(part): partial(_taken, one.detach(), place)
        for part, one, place in zip(parts, whole, places, strict=True)
        if len(place[1]) > 1
    }
    if not made or not can_hook_saved_tensors():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(
        lambda kept: made.get(_layout(kept), kept.detach()),
        lambda kept: kept() if isinstance(kept, partial) else kept,
    )


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _joined(parts: list[torch.Tensor], dim: int = 2) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def at_once(inputs: AttentionInputs, pattern: Pattern) -> torch.Tensor:
    """Return attention by one call, whose mask is made for it and not looked into."""
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
    """Return torch's `scaled_dot_product_attention`; key heads may be fewer."""
    q, k, v, scale = inputs
    is_grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(
        q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
    )


def _scored(inputs: AttentionInputs, pattern: Pattern, block: QueryBlock) -> torch.Tensor:
    """Return attention with scores that a function changes, in float32 at least."""
    assert pattern.score is not None
    q, k, v, scale = inputs
    batch, heads, queries, width = q.shape
    exact = torch.promote_types(q.dtype, torch.float32)
    lowest = torch.finfo(exact).min
    # Some devices have no autocast to turn off.
    kind = q.device.type if torch.amp.is_autocast_available(q.device.type) else "cpu"
    with torch.autocast(kind, enabled=False):
        scaled = q.to(exact) * (width**-0.5 if scale is None else scale)
        # Heads that share keys lie one below the other.
        together = scaled.reshape(batch, k.shape[1], -1, width)
        scores = (together @ k.to(exact).mT).view(batch, heads, queries, -1)
        scores = pattern.score(scores, *block.at)
        if block.mask is not None:
            scores = scores.masked_fill(~block.mask, -torch.inf)
        # The greatest score gives 1, so that the sum is 0 for a row that sees nothing, or above 1.
        weights = (scores - scores.detach().amax(-1, keepdim=True).clamp(min=lowest)).exp()
        total = weights.sum(-1, keepdim=True).clamp(min=1.0)
        found = weights.view(batch, k.shape[1], -1, scores.shape[-1]) @ v.to(exact)
        return (found.view(batch, heads, queries, -1) / total).to(q.dtype)


Flex = Callable[..., Any]


def compiled_flex(_: torch.device, shape: Shape | None) -> Flex:
    """Return FlexAttention, to be compiled at its first call; for one `shape` alone if given.

    So it is on CPUs: what Inductor writes there for shapes that change does not always build.
    """
    from torch.nn.attention.flex_attention import flex_attention

    def attend(*args: Any, **kwargs: Any) -> Any:
        return flex_attention(*args, **kwargs)

    return compile_alone(attend, **({} if shape is None else {"dynamic": False}))


def block_mask(pattern: Pattern, shape: Shape) -> BlockMask | None:
    """Return FlexAttention's blocks, of each row and head only where the pattern differs there."""
    from torch.nn.attention.flex_attention import create_block_mask

    if pattern.mask is None:
        return None
    by_row = pattern.seen(rows=shape.batch, device=shape.device).numel() > 1
    by_head = pattern.seen(heads=shape.heads, device=shape.device).numel() > 1
    return create_block_mask(
        pattern.mask, shape.batch if by_row else None, shape.heads if by_head else None,
        shape.queries, shape.keys, device=shape.device,
    )  # fmt: skip


def by_flex(
    inputs: AttentionInputs, pattern: Pattern, flex: Flex, blocks: BlockMask | None
) -> torch.Tensor:
    """Return FlexAttention's result."""
    q, k, v, scale = inputs
    if blocks is not None and pattern.mask is not None:
        blocks.mask_mod = pattern.mask  # that of the call which made them may have changed since
    if not torch.is_grad_enabled():  # on a CPU it refuses what requires gradients even then
        q, k, v = q.detach(), k.detach(), v.detach()
    more = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    found: torch.Tensor = flex(q, k, v, score_mod=pattern.score, block_mask=blocks, **more)
    return found
