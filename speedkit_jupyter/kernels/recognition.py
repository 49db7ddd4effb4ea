"""Which pattern a dense mask is, proven by comparing every value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from speedkit_jupyter.kernels.patterns import composed

# Larger masks are not looked into.
MOST_VALUES = 2**28


@dataclass(frozen=True)
class Recognized:
    """A pattern and its options; `share` is that of the scores that it lets through, 0 to 1."""

    words: str
    options: dict[str, Any] = field(default_factory=dict)
    share: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Return whether SDPA needs no mask for it."""
        return self.words in ("full", "causal")

    @property
    def code(self) -> str:
        """Return the call in place of `F.scaled_dot_product_attention(q, k, v, attn_mask=mask)`."""
        if self.is_plain:
            causal = ", is_causal=True" if self.words == "causal" else ""
            return f"F.scaled_dot_product_attention(q, k, v{causal})"
        given = "".join(
            f", {name}={value if isinstance(value, int | tuple) else name}"
            for name, value in self.options.items()
        )
        return f'attention(q, k, v, "{self.words}"{given})'


def recognized(mask: torch.Tensor, queries: int, keys: int) -> Recognized | None:
    """Return the pattern whose mask this one is, value by value; None where it is another.

    `mask` is what SDPA takes: True for what is seen, or 0 for that and minus infinity for the rest,
    (queries, keys) or (batch, heads, queries, keys), also with sizes of 1.
    """
    seen = _seen(mask)
    if seen is None or seen.shape[-2:] != (queries, keys) or not queries * keys:
        return None
    share = float(seen.float().mean())
    for words, options in _candidates(seen):
        if _is_pattern(seen, words, options):
            return Recognized(words, options, share)
    return None


def _seen(mask: torch.Tensor) -> torch.Tensor | None:
    """Return what is seen, (batch, queries, keys), where the heads are alike and it is plain."""
    if mask.dim() not in (2, 4) or mask.numel() > MOST_VALUES or mask.requires_grad:
        return None
    seen = mask if mask.dim() == 4 else mask[None, None]
    if mask.dtype != torch.bool:
        # A large negative number is not minus infinity for a query that sees nothing.
        lowest = seen <= -1e4
        is_plain = bool(((seen == 0) | lowest).all())
        if not is_plain or bool((lowest & ~seen.isneginf()).all(-1).any()):
            return None
        seen = ~lowest
    if bool((seen != seen[:, :1]).any()):
        return None
    seen = seen[:, 0]
    return seen[:1] if bool((seen == seen[:1]).all()) else seen


def _candidates(seen: torch.Tensor) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield patterns that it may be, the simplest first, and the options by the mask's edges."""
    yield "full", {}
    yield "causal", {}
    rows, queries, keys = seen.shape
    distance = (
        torch.arange(queries, device=seen.device)[:, None]
        - torch.arange(keys, device=seen.device)[None]
    )
    where = distance[seen.any(0)]
    if where.numel():
        left, right = int(where.max()), -int(where.min())
        yield "sliding_window", {"window": left + 1 if right == 0 else (left, right)}
    prefixes = seen[:, 0].sum(-1)
    yield "prefix", {"prefix": int(prefixes[0]) if rows == 1 else prefixes}
    if queries == keys:
        # A document's number is where it begins; what sees nothing is padding.
        begins = torch.where(seen.any(-1), seen.int().argmax(-1), -1)
        ids = begins[0] if rows == 1 else begins
        yield "documents", {"documents": ids}
        yield "causal+documents", {"documents": ids}


def _is_pattern(seen: torch.Tensor, words: str, options: dict[str, Any]) -> bool:
    pattern = composed(words.split("+"), options)
    if pattern.mask is None:
        return bool(seen.all())
    rows, queries, keys = seen.shape
    return bool((pattern.seen(rows, 1, queries, keys, seen.device)[:, 0] == seen).all())
