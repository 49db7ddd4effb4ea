"""`attention()` with a pattern: its checks, its cached masks, and the call of its engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from speedkit_jupyter.extras.kernels import engine_choice, engines, patterns
from speedkit_jupyter.extras.kernels.engines import AttentionInputs, Shape
from speedkit_jupyter.support.exceptions import ArgumentError, StepError, did_you_mean, in_a_line
from speedkit_jupyter.support.tracebacks import hide_internal_frames
from speedkit_jupyter.torchglue.private import is_transforming

ENGINES = ("auto", "dense", "chunks", "flex")
# Cached masks, by a key of the values that the masks depend on; the most recently used are last.
_MASKS: OrderedDict[object, dict[Any, Any]] = OrderedDict()
_KNOWN: dict[object, engine_choice.PatternChoices] = {}


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
    mask_mod: patterns.MaskMod | None = None,
    score_mod: patterns.ScoreMod | None = None,
    scale: float | None = None,
    engine: str = "auto",
    tune: bool = False,
) -> torch.Tensor:
    """Return softmax(q @ k.mT * scale) @ v, with keys masked and scores changed by the pattern.

    Query i and key i are at the same position. A query that sees no key gets zeros. The masks of
    the last 16 patterns are cached, until a value that a mask depends on changes. torch.compile
    does not compile this function. `engine` has no effect on tensor subclasses or in torch.func.

    Args:
        q: queries, (batch, heads, queries, head_dim).
        k: keys, (batch, key_heads, keys, head_dim), where key_heads divides heads.
        v: values, (batch, key_heads, keys, value_dim).
        pattern: full, causal, sliding_window, prefix, documents, alibi or softcap. Join several
            with +, as in "causal+documents": a key is visible if it passes all masks.
        window: for sliding_window, the number of keys up to the query's own; or (before, after).
        prefix: for prefix, the number of leading keys that all queries see, in addition to keys up
            to their own; or a tensor (batch,).
        documents: for documents, integers of shape (length,) or (batch, length): the document of
            each position. Queries see their own document only; negative numbers mark padding.
        slopes: for alibi, (heads,): scores decrease by slope · distance (default: ALiBi's slopes).
        cap: for softcap, each score becomes cap · tanh(score / cap).
        mask_mod: a further mask, `mask_mod(batch, head, query, key)` as in FlexAttention: indices
            are tensors that broadcast, and True means visible.
        score_mod: the last change to scores, `score_mod(score, batch, head, query, key)`.
        scale: factor of the scores (default: 1/√head_dim).
        engine: "dense" (one call), "chunks" (blocks of queries with the keys that they see), "flex"
            (FlexAttention, compiled; on a CPU without gradients only) or "auto". On CUDA and XPU,
            "auto" takes flex, or dense for full, causal or under 128 queries; else dense or chunks.
        tune: with "auto", time engines at the first call of a shape; later calls use the fastest.

    Returns:
        A tensor of shape (batch, heads, queries, value_dim), in the dtype of q or of autocast.

    Raises:
        ArgumentError: a shape, a name or an option is wrong, or a pattern lacks its option.
        StepError: "flex" can't be compiled, or can't compute gradients, on this device.

    Example::

        out = attention(q, k, v, "sliding_window", window=256)  # (batch, heads, length, head_dim)
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
    device = shape.device.type
    has_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if has_autocast and shape.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        inputs = AttentionInputs._make([*(one.to(dtype) for one in inputs[:3]), inputs.scale])
    options["device"] = shape.device
    if "alibi" in words and options["slopes"] is None:
        options["slopes"] = torch.tensor(patterns.slopes_of(shape.heads))
    tensors = {name: one for name, one in options.items() if isinstance(one, torch.Tensor)}
    is_plain = not is_transforming() and all(map(_is_plain, (*inputs[:3], *tensors.values())))
    key = _key(words, options) if is_plain else None
    masks = _MASKS.get(key, {})
    here = options | {name: one.to(shape.device) for name, one in tensors.items()}
    pattern = patterns.composed(patterns.names_in(words, here), here)
    if not is_plain:
        return engines.at_once(inputs, pattern)
    if key is not None:
        _MASKS[key] = masks
        _MASKS.move_to_end(key)
        if len(_MASKS) > engine_choice.MOST_KEPT:
            _MASKS.popitem(last=False)
    prepared = engine_choice.Prepared(pattern, masks, _known(words, options))
    if engine == "auto":
        return prepared.run_best(inputs, tune)
    try:
        return prepared.run(inputs, engine_choice.EngineChoice(engine, engine_choice.SIZES[0]))
    except Exception as error:
        if engine != "flex" or not engine_choice.is_unsupported(error):
            raise
        raise StepError(f"take engine='auto': FlexAttention fails: {in_a_line(error)}") from None


def _checked(inputs: AttentionInputs, documents: Any, engine: str) -> Shape:
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


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a Tensor or Parameter, not empty, and not on the meta device."""
    is_known = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_known and not tensor.is_meta and tensor.numel() > 0


def _key(words: str, options: Mapping[str, Any]) -> object:
    """Return the cache key of a pattern's masks, or None if changed values can't be detected."""
    # The key ignores options that no cached mask depends on: each call applies them to the scores.
    read = {**options, "cap": None, "score_mod": options["score_mod"] is None}
    if options["slopes"] is not None and options["slopes"].requires_grad:
        read["slopes"] = None
    return patterns.key_of([words, torch.get_default_dtype(), *read.values()])


def _known(words: str, options: Mapping[str, Any]) -> engine_choice.PatternChoices:
    alike = words, *(
        tuple(one.shape) if isinstance(one, torch.Tensor)
        else getattr(one, "__code__", type(one) if callable(one) else str(one))
        for one in options.values()
    )  # fmt: skip
    return _KNOWN.setdefault(alike, engine_choice.PatternChoices())


def forget_masks() -> str:
    """Release the cached masks of all patterns; return a description of them, or "" if none."""
    found = "masks of attention()" if _MASKS else ""
    _MASKS.clear()
    return found
