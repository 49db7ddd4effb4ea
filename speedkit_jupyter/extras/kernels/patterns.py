"""Patterns of attention: which keys a query sees, what becomes of its scores, and which pattern a
dense mask is, proven by comparing every value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch

from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import ArgumentError, did_you_mean

# Torch's own: `mask_mod(batch, head, query, key)` and `score_mod(score, batch, head, query, key)`.
MaskMod = Callable[..., "torch.Tensor"]
ScoreMod = Callable[..., "torch.Tensor"]
# The keys, from the first to behind the last, that queries from `first` to behind `last` may see.
Span = Callable[[int, int], tuple[int, int]]
Options = Mapping[str, Any]
# Larger masks are not looked into.
MOST_VALUES = 2**28


@dataclass(frozen=True)
class Pattern:
    """`mask` and `score` as FlexAttention takes them; their indices are tensors that broadcast.

    None of both is full attention. `is_bias` says that `score` adds what does not depend on the
    score, and `is_causal` that the mask is the causal one alone. Outside its `span` a query sees
    nothing, which saves looking there.
    """

    mask: MaskMod | None = None
    score: ScoreMod | None = None
    span: Span = lambda first, last: (0, 2**62)
    is_bias: bool = True
    is_causal: bool = False

    @property
    def is_plain(self) -> bool:
        """Return whether torch's SDPA computes it without a mask."""
        return self.score is None and (self.mask is None or self.is_causal)

    def seen(
        self, rows: int = 1, heads: int = 1, queries: int = 1, keys: int = 1, device: Any = None
    ) -> torch.Tensor:
        """Return the mask of the first positions, with sizes of 1 where it does not differ."""
        if self.mask is None:
            return torch.ones((), dtype=torch.bool, device=device)
        return self.mask(*positions(rows, heads, queries, keys, device=device))

    def and_then(self, other: Pattern) -> Pattern:
        """Return the pattern that sees what both see, and changes scores by one after the other."""
        masks = [one.mask for one in (self, other) if one.mask is not None]
        scores = [one.score for one in (self, other) if one.score is not None]
        return Pattern(
            masks[0] if len(masks) == 1 else _both(*masks) if masks else None,
            scores[0] if len(scores) == 1 else _chained(*scores) if scores else None,
            _overlap(self.span, other.span),
            self.is_bias and other.is_bias,
            len(masks) == 1 and (self.is_causal or other.is_causal),
        )


def positions(*counts: int, device: Any = None) -> list[torch.Tensor]:
    """Return the first indices along each dimension, as tensors that broadcast."""
    shapes = [
        [-1 if n == number else 1 for n in range(len(counts))] for number in range(len(counts))
    ]
    return [torch.arange(n, device=device).view(one) for n, one in zip(counts, shapes, strict=True)]


def _both(first: MaskMod, second: MaskMod) -> MaskMod:
    return lambda b, h, q, k: first(b, h, q, k) & second(b, h, q, k)


def _chained(first: ScoreMod, second: ScoreMod) -> ScoreMod:
    return lambda score, b, h, q, k: second(first(score, b, h, q, k), b, h, q, k)


def _overlap(one: Span, other: Span) -> Span:
    def both(first: int, last: int) -> tuple[int, int]:
        (low, high), (least, most) = one(first, last), other(first, last)
        return max(low, least), min(high, most)

    return both


def full(_: Options) -> Pattern:
    """Let each query see every key."""
    return Pattern()


def causal(_: Options) -> Pattern:
    """Let query i see keys 0 to i."""
    return Pattern(
        mask=lambda b, h, q, k: q >= k, span=lambda first, last: (0, last), is_causal=True
    )


def sliding_window(options: Options) -> Pattern:
    """Let query i see its own key and those before it, `window` in all; or (left, right) of it."""
    window = options["window"]
    sides = (window - 1, 0) if isinstance(window, int) else tuple(window)
    if len(sides) != 2 or not all(isinstance(one, int) for one in sides) or sides[0] < -1:
        shown = arguments.shown(window)
        raise ArgumentError(f"window must be a number of keys or (left, right), not {shown}")
    left, right = sides
    return Pattern(
        mask=lambda b, h, q, k: (q - k <= left) & (k - q <= right),
        span=lambda first, last: (first - left, last + right),
    )


def prefix(options: Options) -> Pattern:
    """Let query i see the first `prefix` keys, and keys 0 to i."""
    length = options["prefix"]
    if isinstance(length, int):
        return Pattern(
            mask=lambda b, h, q, k: (k < length) | (q >= k),
            span=lambda first, last: (0, max(length, last)),
        )
    return Pattern(mask=lambda b, h, q, k: (k < length[b]) | (q >= k))


def documents(options: Options) -> Pattern:
    """Let each query see the keys of its own document; a negative number is padding, unseen."""
    ids = options["documents"]
    if ids.dim() == 1:
        return Pattern(mask=lambda b, h, q, k: (ids[q] == ids[k]) & (ids[q] >= 0))
    return Pattern(mask=lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (ids[b, q] >= 0))


def alibi(options: Options) -> Pattern:
    """Take the distance from each score, times the slope of the head."""
    slopes = options["slopes"]
    return Pattern(
        score=lambda score, b, h, q, k: score - slopes[h] * (q - k).abs(),
        is_bias=not slopes.requires_grad,
    )


def slopes_of(heads: int) -> list[float]:
    """Return ALiBi's slopes, steepest first in each half (O. Press et al., ICLR 2022)."""
    power = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * number / power) for number in range(1, power + 1)]
    # For other numbers of heads: every other slope of twice as many heads.
    return first + [2 ** (-4 * number / power) for number in range(1, 2 * (heads - power), 2)]


def softcap(options: Options) -> Pattern:
    """Keep each score between -cap and cap, by tanh."""
    cap = options["cap"]
    return Pattern(score=lambda score, b, h, q, k: cap * (score / cap).tanh(), is_bias=False)


PATTERNS: dict[str, Callable[[Options], Pattern]] = {
    one.__name__: one for one in (full, causal, sliding_window, prefix, documents, alibi, softcap)
}
# The pattern that each option belongs to. ALiBi has slopes of its own.
OWNERS = {"window": "sliding_window", "prefix": "prefix", "documents": "documents",
          "cap": "softcap", "slopes": "alibi"}  # fmt: skip


def names_in(words: str, options: Options) -> list[str]:
    """Return the names in `causal+documents`; raises ArgumentError with what is wrong."""
    names = [word.strip() for word in words.split("+")]
    for name in names:
        if name not in PATTERNS:
            near = did_you_mean(name, PATTERNS) or f" There are {', '.join(PATTERNS)}."
            raise ArgumentError(f"there is no pattern {name!r}.{near}")
    for option, owner in OWNERS.items():
        if options[option] is not None and owner not in names:
            given = f"{option}={arguments.shown(options[option])}"
            raise ArgumentError(f"pattern {words!r}: {given} belongs to {owner}")
        if options[option] is None and owner in names and option != "slopes":
            raise ArgumentError(f"pattern {words!r}: {owner} needs {option}=…")
    return names


def composed(names: Sequence[str], options: Options) -> Pattern:
    """Return the pattern of these names, and of the user's functions after them."""
    parts = [PATTERNS[name](options) for name in names]
    mask, score = options.get("mask_mod"), options.get("score_mod")
    if mask is not None or score is not None:
        parts.append(Pattern(mask, score, is_bias=score is None))
    return reduce(Pattern.and_then, parts)


# --- the pattern of a mask ---


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
