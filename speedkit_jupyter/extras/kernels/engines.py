"""Three ways to compute attention: by blocks of queries, all at once, or by FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from speedkit_jupyter.catalog.properties.compiled import compile_alone
from speedkit_jupyter.extras.kernels.blocks import (
    AttentionInputs,
    BlockLayout,
    QueryBlock,
    Shape,
    bias,
)
from speedkit_jupyter.extras.kernels.patterns import Pattern
from speedkit_jupyter.torchglue.private import can_hook_saved_tensors

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def by_blocks(inputs: AttentionInputs, pattern: Pattern, layout: BlockLayout) -> torch.Tensor:
    """Return attention, for each block of queries with the keys that it sees."""
    rows = []
    for row, blocks in layout.rows:
        every = inputs.q[row].split(layout.size, 2)
        parts = [_Parts(one[row], layout.size) for one in (inputs.k, inputs.v)]
        found = []
        for queries, block in zip(every, blocks, strict=True):
            keys, values = (one.taken(block.runs) for one in parts)
            with _remade({keys: parts[0], values: parts[1]}, block):
                one = AttentionInputs(queries, keys, values, inputs.scale)
                found.append(_attended(one, pattern, block))
        rows.append(_joined(found))
    return _joined(rows, 0)


class _Parts:
    """Runs of a tensor's positions.

    They are views where nothing is learned. Else they are joined from blocks: the gradient of each
    view would be as large as the whole.
    """

    def __init__(self, whole: torch.Tensor, size: int) -> None:
        self._whole, self._size = whole, size
        self.is_learned = torch.is_grad_enabled() and whole.requires_grad
        self._blocks = whole.split(size, 2) if self.is_learned else ()

    def taken(self, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return the runs one after the other."""
        size = self._size
        if not self._blocks:
            return self.copied(runs)
        return _joined(
            [one for low, high in runs for one in self._blocks[low // size : -(-high // size)]]
        )

    def copied(self, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return the same without its graph."""
        return _joined([self._whole.detach()[:, :, low:high] for low, high in runs])


def _joined(parts: list[torch.Tensor], dim: int = 2) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@contextmanager
def _remade(copies: Mapping[torch.Tensor, _Parts], block: QueryBlock) -> Iterator[None]:
    """Keep none of these copies for the backward pass: they are made again there."""
    from torch.autograd.graph import saved_tensors_hooks

    # torch keeps `pack` as long as what it packed: it must not hold the copies itself.
    made = {_place(one): parts for one, parts in copies.items() if parts.is_learned}

    def pack(kept: torch.Tensor) -> Any:
        parts = made.get(_place(kept))
        return kept if parts is None else partial(parts.copied, block.runs)

    if not made or not can_hook_saved_tensors():
        yield
        return
    with saved_tensors_hooks(pack, lambda kept: kept() if isinstance(kept, partial) else kept):
        yield


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


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
    with torch.autocast(q.device.type, enabled=False):
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
    if not torch.is_grad_enabled():  # on a CPU it refuses what requires gradients even then
        q, k, v = q.detach(), k.detach(), v.detach()
    more = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    found: torch.Tensor = flex(q, k, v, score_mod=pattern.score, block_mask=blocks, **more)
    return found
