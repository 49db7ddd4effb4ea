"""Compare the speed of `attention(…, pattern)` with the faster of two versions by hand.

Each pattern and length runs in training and without gradients. One version by hand is SDPA with a
dense mask, or products and a softmax for soft-cap. The other is compiled FlexAttention, on CPUs
only without gradients. Making the masks is not timed. All versions run interleaved in shuffled
rounds. "tuned" is `attention` with `tune=True`, "by default" without it. Exits 1 if the interval of
the speed is entirely below 0.97 of the faster version by hand. In training this is the speed by
default, without gradients the tuned speed.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from _program import Row, collected, parser_of, product
from _tables import interval, reported
from _timing import DEVICE, interleaved_s, over
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from speedkit_jupyter import attention
from speedkit_jupyter.extras.kernels import attention as kernels
from speedkit_jupyter.extras.kernels.patterns import slopes_of
from speedkit_jupyter.support import units

# Keeps Inductor from testing vector instructions by compiling C++, which takes seconds in each row.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
HEADS, WIDTH, WINDOW, PREFIX, CAP = 8, 64, 256, 128, 30.0
# Documents of uneven lengths begin at tokens 37, 111, 222, 370 and so on.
STARTS = torch.arange(1, 400).mul(37).remainder(331).cumsum(0)
AT_LEAST = 0.97


# The options of `attention`, and FlexAttention's mask_mod and score_mod (or None).
Made = tuple[dict[str, Any], Callable[..., Any], Callable[..., Any] | None]


def pattern_of(name: str, length: int) -> Made:
    documents = torch.bucketize(torch.arange(length), STARTS, right=True).to(DEVICE)
    each = torch.tensor(slopes_of(HEADS), device=DEVICE)
    causal = lambda b, h, q, k: q >= k  # noqa: E731
    window = lambda b, h, q, k: (q >= k) & (q - k < WINDOW)  # noqa: E731
    patterns: dict[str, Made] = {
        "causal": ({}, causal, None),
        "sliding_window": ({"window": WINDOW}, window, None),
        "prefix": ({"prefix": PREFIX}, lambda b, h, q, k: (q >= k) | (k < PREFIX), None),
        "causal+documents": ({"documents": documents},
                             lambda b, h, q, k: (q >= k) & (documents[q] == documents[k]), None),
        "causal+alibi": ({}, causal, lambda s, b, h, q, k: s - each[h] * (q - k)),
        "sliding_window+softcap": ({"window": WINDOW, "cap": CAP}, window,
                                   lambda s, b, h, q, k: CAP * torch.tanh(s / CAP)),
    }  # fmt: skip
    return patterns[name]


NAMES = ("causal", "sliding_window", "prefix", "causal+documents", "causal+alibi",
         "sliding_window+softcap")  # fmt: skip


def main() -> int:
    options = parser_of(__doc__, "attention.jsonl", lengths="512,1024", rounds=11).parse_args()
    lengths = map(int, options.lengths.split(","))
    keys = product(length=lengths, pattern=NAMES, training=(True, False))
    rows = collected(options, keys, partial(measured, rounds=options.rounds), cells)
    return reported(rows, HEAD, cells, promises)


def promises(row: Row) -> dict[str, bool]:
    way = "default" if row["training"] else "tuned"
    return {f"length {row['length']}, slower than by hand, {way}": row[way][2] >= AT_LEAST}


def measured(pattern: str, length: int, training: bool, rounds: int) -> Row:
    """Return each version's seconds, and the speed of `attention` over the faster one by hand."""
    options, mask_mod, score_mod = pattern_of(pattern, length)
    size = (1, HEADS, length, WIDTH)
    inputs = [torch.randn(size, device=DEVICE, requires_grad=training) for _ in "qkv"]
    ways: dict[str, Callable[..., torch.Tensor]] = {
        "default": alone(pattern, options),
        "tuned": alone(pattern, {**options, "tune": True}),
        "dense": by_hand(pattern, mask_mod, score_mod, length),
    }
    if not (training and DEVICE == "cpu"):
        blocks = create_block_mask(mask_mod, None, None, length, length, device=DEVICE)
        flex = torch.compile(flex_attention, dynamic=False)
        ways["flex"] = partial(flex, block_mask=blocks, score_mod=score_mod)
    steps = {name: partial(step, way, inputs, training) for name, way in ways.items()}
    with torch.set_grad_enabled(training):
        times = interleaved_s(steps, rounds)
    others = [name for name in ("dense", "flex") if name in times]
    best = min(others, key=lambda name: median(times[name]))
    return {
        "best": best,
        "seconds": {name: median(found) for name, found in times.items()},
        **{name: over(times[best], times[name]) for name in ("default", "tuned")},
    }


def alone(pattern: str, options: dict[str, Any]) -> Callable[..., torch.Tensor]:
    known: dict[object, Any] = {}
    masks: OrderedDict[object, Any] = OrderedDict()

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        kernels._KNOWN, kernels._MASKS = known, masks
        return attention(*inputs, pattern, **options)

    return call


def by_hand(
    pattern: str, mask_mod: Callable[..., Any], score_mod: Callable[..., Any] | None, length: int
) -> Callable[..., torch.Tensor]:
    """Return SDPA with a dense mask (none for causal), or products and a softmax for soft-cap."""
    if pattern == "causal":
        return partial(functional.scaled_dot_product_attention, is_causal=True)
    at = torch.arange(length, device=DEVICE)
    head, q, k = torch.arange(HEADS, device=DEVICE)[:, None, None], at[:, None], at[None]
    mask, zero = mask_mod(0, 0, q, k), torch.zeros((), device=DEVICE)
    if pattern != "sliding_window+softcap":
        added = None if score_mod is None else score_mod(zero, 0, head, q, k)
        given = mask if added is None else added.masked_fill(~mask, -torch.inf)
        return partial(functional.scaled_dot_product_attention, attn_mask=given)

    def products(*inputs: torch.Tensor) -> torch.Tensor:
        queries, keys, values = inputs
        scores = score_mod(queries @ keys.mT * WIDTH**-0.5, 0, head, q, k)
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values

    return products


def step(way: Callable[..., torch.Tensor], inputs: list[torch.Tensor], training: bool) -> None:
    found = way(*inputs)
    if training:
        torch.autograd.grad(found.sum(), inputs)


HEAD = ("pattern", "length", "", "by default", "tuned", "by hand")


def cells(row: Row) -> list[str]:
    """Return a line with speeds over the faster version by hand, and that version's seconds."""
    best, kind = row["best"], "training" if row["training"] else "without gradients"
    gains = (interval(row[way]) for way in ("default", "tuned"))
    seconds = units.seconds(row["seconds"][best])
    return [row["pattern"], str(row["length"]), kind, *gains, f"{best}: {seconds}"]


if __name__ == "__main__":
    sys.exit(main())
