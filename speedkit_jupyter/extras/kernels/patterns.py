"""Define attention patterns as masks and changes to scores, and the cache keys of masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import FunctionType
from typing import Any

import torch

from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import ArgumentError, did_you_mean
from speedkit_jupyter.torchglue.private import version

# Signatures as in FlexAttention: `mask_mod(batch, head, query, key)`, `score_mod(score, …)`.
MaskMod = Callable[..., "torch.Tensor"]
ScoreMod = Callable[..., "torch.Tensor"]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Pattern:
    """A mask and a change to scores, as in FlexAttention; with neither, attention is full."""

    mask: MaskMod | None = None
    score: ScoreMod | None = None
    is_bias: bool = True  # `score` only adds values that need no gradient and ignore the score
    is_causal: bool = False  # the mask is exactly causal

    @property
    def is_plain(self) -> bool:
        """Return whether torch's SDPA can compute the pattern without a mask tensor."""
        return self.score is None and (self.mask is None or self.is_causal)

    def seen(
        self, rows: int = 1, heads: int = 1, queries: int = 1, keys: int = 1, device: Any = None
    ) -> torch.Tensor:
        """Return the mask tensor, with size 1 in ignored dimensions; scalar True without a mask."""
        if self.mask is None:
            return torch.ones((), dtype=torch.bool, device=device)
        return self.mask(*positions(rows, heads, queries, keys, device=device))


def positions(*counts: int, device: Any = None) -> list[torch.Tensor]:
    """Return the indices 0 to n - 1 of each dimension of size n, as tensors that broadcast."""
    every = range(len(counts))
    shapes = [[-1 if n == number else 1 for n in every] for number in every]
    return [torch.arange(n, device=device).view(one) for n, one in zip(counts, shapes, strict=True)]


def sliding_window(options: Options) -> Pattern:
    """Return a pattern where query i sees `window` keys up to i, or keys i - left to i + right."""
    window = options["window"]
    sides = (window - 1, 0) if isinstance(window, int) else window
    is_pair = isinstance(sides, tuple | list) and [*map(type, sides)] == [int, int]
    if not is_pair or sides[0] < -1:
        shown = arguments.shown(window)
        raise ArgumentError(f"window must be a number of keys or (left, right), not {shown}")
    left, right = sides
    return Pattern(mask=lambda b, h, q, k: (q - k <= left) & (k - q <= right))


def prefix(options: Options) -> Pattern:
    """Return a pattern where query i sees the first `prefix` keys and all keys up to i."""
    length = options["prefix"]
    if isinstance(length, int):
        return Pattern(mask=lambda b, h, q, k: (k < length) | (q >= k))
    return Pattern(mask=lambda b, h, q, k: (k < length[b]) | (q >= k))


def documents(options: Options) -> Pattern:
    """Return a pattern where a query sees its document's keys; padding (negative ids) sees none."""
    ids = options["documents"]
    if ids.dim() == 1:
        return Pattern(mask=lambda b, h, q, k: (ids[q] == ids[k]) & (ids[q] >= 0))
    return Pattern(mask=lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (ids[b, q] >= 0))


def alibi(options: Options) -> Pattern:
    """Return a pattern that lowers a score by the head's slope times the query-key distance."""
    slopes = options["slopes"]
    return Pattern(
        score=lambda score, b, h, q, k: score - slopes[h] * (q - k).abs(),
        is_bias=not slopes.requires_grad,
    )


def slopes_of(heads: int) -> list[float]:
    """Return ALiBi's slope for each head (O. Press et al., ICLR 2022)."""
    power = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * number / power) for number in range(1, power + 1)]
    # Further heads get every second slope of a model with `2 * power` heads.
    return first + [2 ** (-4 * number / power) for number in range(1, 2 * (heads - power), 2)]


def softcap(options: Options) -> Pattern:
    """Return a pattern that limits scores to between -cap and cap, by tanh."""
    cap = options["cap"]
    return Pattern(score=lambda score, b, h, q, k: cap * (score / cap).tanh(), is_bias=False)


PATTERNS: dict[str, Callable[[Options], Pattern]] = {
    "full": lambda _: Pattern(),
    "causal": lambda _: Pattern(lambda b, h, q, k: q >= k, is_causal=True),
    **{one.__name__: one for one in (sliding_window, prefix, documents, alibi, softcap)},
}
# The pattern that each option belongs to. Only ALiBi needs no option: it has default slopes.
OWNERS = {"window": "sliding_window", "prefix": "prefix", "documents": "documents",
          "cap": "softcap", "slopes": "alibi"}  # fmt: skip


def names_in(words: str, options: Options) -> list[str]:
    """Return the names joined by + in `words`; raise ArgumentError for wrong names or options."""
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
    """Combine patterns: keys must pass all masks, and scores change in order, `score_mod` last."""
    parts = [PATTERNS[name](options) for name in names]
    mask, score = options.get("mask_mod"), options.get("score_mod")
    parts.append(Pattern(mask, score, is_bias=score is None))
    masks = [one.mask for one in parts if one.mask is not None]
    scores = [one.score for one in parts if one.score is not None]
    both = lambda f, g: lambda b, h, q, k: f(b, h, q, k) & g(b, h, q, k)  # noqa: E731
    chained = lambda f, g: lambda s, b, h, q, k: g(f(s, b, h, q, k), b, h, q, k)  # noqa: E731
    return Pattern(
        reduce(both, masks) if masks else None,
        reduce(chained, scores) if scores else None,
        all(one.is_bias for one in parts),
        len(masks) == 1 and any(one.is_causal for one in parts),
    )


# --- the cache key of a mask: equal keys mean equal masks ---

# Immutable types, compared by value.
PLAIN = {int, float, complex, bool, str, type(None), torch.dtype, torch.device}
# CPU tensors up to this size are compared by value; others by identity and version counter.
COMPARED_BYTES = 2**20
# Builtins, modules and attributes that a function with a key may use: none reads hidden state.
PURE = {
    "abs", "all", "any", "bitwise_and", "bitwise_or", "bool", "clamp", "device", "dtype", "eq",
    "float", "floor", "floor_divide", "int", "int32", "int64", "isin", "len", "logical_and",
    "logical_not", "logical_or", "long", "math", "max", "maximum", "min", "minimum", "ne",
    "new_ones", "new_zeros", "range", "remainder", "shape", "size", "sqrt", "torch", "where",
}  # fmt: skip


def key_of(value: Any, within: tuple[FunctionType, ...] = ()) -> object:
    """Return a cache key of a value or function; None if a change could go unnoticed."""
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind in (tuple, list):
        keys = [key_of(one, within) for one in value]
        return None if None in keys else (kind, *keys)
    if kind in (torch.Tensor, torch.nn.Parameter):
        if value.device.type == "cpu" and value.nbytes <= COMPARED_BYTES:
            numbers = value.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
            return value.dtype, value.shape, numbers.numpy().tobytes()
        # The key holds the tensor, not its id: a later tensor may get the same id.
        return None if value.requires_grad or value.is_inference() else (value, version(value))
    if kind is FunctionType:
        return "itself" if value in within else _of_function(value, (*within, value))
    return value.__name__ if value is torch or value is math else None


def _of_function(function: FunctionType, within: tuple[FunctionType, ...]) -> object:
    """Return a function's code and a key of the values it reads; None if some are unknown."""
    code, names = function.__code__, function.__globals__
    is_known = all(name in names or name in PURE for name in code.co_names)
    if not is_known or any(isinstance(one, type(code)) for one in code.co_consts):
        return None
    try:
        cells = [one.cell_contents for one in function.__closure__ or ()]
    except ValueError:  # a closure variable without a value
        return None
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    read = [names[name] for name in code.co_names if name in names]
    keys = key_of([cells, defaults, read], within)
    return keys and (code, keys)
