"""Attention by a pattern: computes the scores that the pattern lets through, and few others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from speedkit_jupyter.extras.kernels.blocks import AttentionInputs, Shape
from speedkit_jupyter.extras.kernels.engine_choice import (
    SIZES,
    EngineChoice,
    PatternChoices,
    Prepared,
)
from speedkit_jupyter.extras.kernels.patterns import MaskMod, ScoreMod, composed, names_in
from speedkit_jupyter.support.exceptions import ArgumentError, did_you_mean
from speedkit_jupyter.support.tracebacks import hide_internal_frames
from speedkit_jupyter.torchglue.private import version

ENGINES = ("auto", "dense", "chunks", "flex")
# This many patterns are kept with their masks, those used last.
KEPT = 16
_PREPARED: OrderedDict[object, Prepared] = OrderedDict()
_KNOWN: dict[object, PatternChoices] = {}


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: str = "full",
    *,
    window: int | tuple[int, int] | None = None,
    prefix: int | torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    cap: float | None = None,
    mask_mod: MaskMod | None = None,
    score_mod: ScoreMod | None = None,
    scale: float | None = None,
    engine: str = "auto",
    tune: bool = False,
) -> torch.Tensor:
    """Return softmax(q @ k.mT * scale) @ v over the keys that the pattern lets each query see.

    Shapes: q is (batch, heads, queries, head_dim); k (batch, key_heads, keys, head_dim) and v
    (batch, key_heads, keys, value_dim), where key_heads divides heads; the result is (batch, heads,
    queries, value_dim). Query i and key i are at the same position. A query that sees no key
    gives zeros.

    Patterns, joined by + as in "causal+documents":
      full, causal
      sliding_window  the query's own key and those before it, `window` in all; or (left, right)
      prefix          the first `prefix` keys (a number, or one for each row) and those before it
      documents       keys with the same number in `documents`, (length,) or (batch, length);
                      a negative number is padding
      alibi           `slopes` (heads,) times the distance off each score; the paper's by default
      softcap         cap · tanh(score / cap)
    `mask_mod(batch, head, query, key)` and `score_mod(score, batch, head, query, key)` come after
    them, as torch's FlexAttention takes them; their indices are tensors that broadcast. Masks are
    kept: give the same function and the same tensors again.

    The engine is chosen by a rule: `dense` (one call of torch's SDPA), `chunks` (blocks of queries
    with the keys that they see) or `flex` (FlexAttention, compiled; on a CPU without gradients
    only). With `tune=True` the first call of a shape measures them, and the session remembers. On
    a CPU without gradients a shape that has taken 5 s tries `flex` by itself: one call compiles it
    and compares its values, the next ones time it.
    torch.compile leaves this function as it is. Raises ArgumentError for what does not fit.
    """
    __tracebackhide__ = True
    call = partial(
        _attention, AttentionInputs(q, k, v, scale), pattern, engine, tune, window=window,
        prefix=prefix, documents=documents, slopes=slopes, cap=cap,
        mask_mod=mask_mod, score_mod=score_mod,
    )  # fmt: skip
    return torch.compiler.disable(call)() if torch.compiler.is_compiling() else call()


@hide_internal_frames
def _attention(
    inputs: AttentionInputs, words: str, engine: str, tune: bool, **options: Any
) -> torch.Tensor:
    shape = _checked(inputs, options["documents"], engine)
    if torch.is_autocast_enabled(shape.device.type) and shape.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(shape.device.type)
        q, k, v = (one.to(dtype) for one in inputs[:3])
        inputs = inputs._replace(q=q, k=k, v=v)
        shape = inputs.shape
    options |= {"heads": shape.heads, "device": shape.device}
    prepared = _prepared(words, options)
    if engine != "auto":
        return prepared.run(inputs, EngineChoice(engine, SIZES[0]))
    return prepared.run_best(inputs, tune)


def _checked(inputs: AttentionInputs, documents: Any, engine: str) -> Shape:
    """Return the shape; raises ArgumentError with what is wrong about it."""
    sizes = [tuple(getattr(one, "shape", ())) for one in inputs[:3]]
    if [len(one) for one in sizes] != [4, 4, 4]:
        shown = ", ".join(map(str, sizes))
        raise ArgumentError(f"q, k and v must be (batch, heads, length, head_dim), not {shown}")
    (batch, heads, queries, width), key, value = sizes
    if key[0] != batch or key[3] != width or value[:3] != key[:3] or heads % max(key[1], 1):
        raise ArgumentError(f"q {sizes[0]}, k {key} and v {value} do not fit together")
    n, size = max(queries, key[2]), tuple(getattr(documents, "shape", ()))
    if documents is not None and size not in ((n,), (batch, n)):
        raise ArgumentError(f"documents must be ({n},) or ({batch}, {n}), not {size}")
    if engine not in ENGINES:
        near = did_you_mean(engine, ENGINES)
        raise ArgumentError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}.{near}")
    return inputs.shape


def _keys(words: str, options: Mapping[str, Any]) -> tuple[object, object]:
    """Return what patterns that are measured together share, and what tells each from others."""
    alike, key = list[object]([words]), list[object]([words])
    for value in options.values():
        if isinstance(value, torch.Tensor):
            alike.append(tuple(value.shape))
            # A bias that is learned is computed at each call.
            key.append((id(value), None if value.requires_grad else version(value)))
        else:
            plain = tuple(value) if isinstance(value, list) else value
            alike.append(getattr(value, "__code__", plain))
            key.append(plain)
    return tuple(alike), tuple(key)


def _prepared(words: str, options: Mapping[str, Any]) -> Prepared:
    alike, key = _keys(words, options)
    if key not in _PREPARED:
        here = {
            name: one.to(options["device"]) if isinstance(one, torch.Tensor) else one
            for name, one in options.items()
        }
        pattern = composed(names_in(words, here), here)
        _PREPARED[key] = Prepared(pattern, options, _KNOWN.setdefault(alike, PatternChoices()))
    _PREPARED.move_to_end(key)
    while len(_PREPARED) > KEPT:
        _PREPARED.popitem(last=False)
    return _PREPARED[key]


class AttentionPattern(torch.nn.Module):
    """`attention` with a pattern and its options as a module; shapes are those of `attention`.

    `AttentionPattern("sliding_window", window=256)(q, k, v)`. What changes from batch to batch
    is given at the call: `AttentionPattern("causal+documents")(q, k, v, documents=ids)`.
    Tensors among the options are buffers or parameters.
    """

    def __init__(self, pattern: str = "full", **options: Any) -> None:
        super().__init__()
        self.pattern, self._names = pattern, [*options]
        for name, value in options.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                self.register_buffer(name, value, persistent=False)
            else:
                setattr(self, name, value)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any
    ) -> torch.Tensor:
        own = {name: getattr(self, name) for name in self._names}
        return attention(q, k, v, self.pattern, **{**own, **given})

    def extra_repr(self) -> str:
        plain = (f"{n}={vars(self)[n]}" for n in self._names if n in vars(self))
        return ", ".join([repr(self.pattern), *plain])
