"""Attention with a pattern, which computes few scores that the pattern masks."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch

from speedkit_jupyter.extras.kernels import engine_choice, engines, patterns
from speedkit_jupyter.extras.kernels.engines import AttentionInputs, Shape
from speedkit_jupyter.support.exceptions import ArgumentError, did_you_mean
from speedkit_jupyter.support.tracebacks import hide_internal_frames
from speedkit_jupyter.torchglue.private import is_transforming, version

ENGINES = ("auto", "dense", "chunks", "flex")
# Cached masks by the key of the values that they depend on, the newest last.
_MASKS: OrderedDict[object, dict[Any, Any]] = OrderedDict()
_KNOWN: dict[object, engine_choice.PatternChoices] = {}
# Immutable types.
PLAIN = {int, float, complex, bool, str, type(None), torch.dtype, torch.device}
# CPU tensors up to this size are compared by value, others by torch's version counter.
COMPARED_BYTES = 2**20
# Builtins, and functions of torch and its tensors, that depend only on their arguments.
PURE = {
    "abs", "all", "any", "bitwise_and", "bitwise_or", "bool", "clamp", "device", "dtype", "eq",
    "float", "floor", "floor_divide", "int", "int32", "int64", "isin", "len", "logical_and",
    "logical_not", "logical_or", "long", "math", "max", "maximum", "min", "minimum", "ne",
    "new_ones", "new_zeros", "range", "remainder", "shape", "size", "sqrt", "torch", "where",
}  # fmt: skip


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
    """Return softmax(q @ k.mT * scale) @ v over the keys that the pattern lets each query see.

    Query i and key i are at the same position. The result of a query that sees no key is zeros. A
    mask is cached until a value that it depends on changes. torch.compile does not compile this
    function.

    Args:
        q: queries, (batch, heads, queries, head_dim).
        k: keys, (batch, key_heads, keys, head_dim), where key_heads divides heads.
        v: values, (batch, key_heads, keys, value_dim).
        pattern: full, causal, sliding_window, prefix, documents, alibi or softcap, joined by + as
            in "causal+documents".
        window: for sliding_window, the number of keys up to the query's own; or (left, right).
        prefix: for prefix, the number of first keys that all see; also one for each row.
        documents: for documents, integers of shape (length,) or (batch, length): the document of
            each position. Positions see their own document only; a negative number is padding.
        slopes: for alibi, (heads,): a score decreases by its head's slope times the distance
            (default: the slopes of the paper).
        cap: for softcap: each score becomes cap · tanh(score / cap).
        mask_mod: a further mask, `mask_mod(batch, head, query, key)` as in FlexAttention; its
            indices are tensors that broadcast.
        score_mod: a further change of scores, `score_mod(score, batch, head, query, key)`.
        scale: factor of the scores (default: 1/√head_dim).
        engine: "dense" (one call of torch's SDPA), "chunks" (blocks of queries with the keys that
            they see), "flex" (FlexAttention, compiled; on a CPU without gradients only), or "auto",
            which chooses by a rule: flex on GPUs.
        tune: measure the engines at the first call with a shape, and use the fastest from then on.

    Returns:
        A tensor of shape (batch, heads, queries, value_dim).

    Raises:
        ArgumentError: shapes or options do not fit.

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
        q, k, v = (one.to(dtype) for one in inputs[:3])
        inputs = inputs._replace(q=q, k=k, v=v)
        shape = inputs.shape
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
        if len(_MASKS) > engine_choice.KEPT:
            _MASKS.popitem(last=False)
    prepared = engine_choice.Prepared(pattern, masks, _known(words, options))
    if engine != "auto":
        return prepared.run(inputs, engine_choice.EngineChoice(engine, engine_choice.SIZES[0]))
    return prepared.run_best(inputs, tune)


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
    """Return whether a tensor's values can be read and similar tensors created."""
    is_known = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_known and not tensor.is_meta and tensor.numel() > 0


def _key(words: str, options: Mapping[str, Any]) -> object:
    """Return the key of a pattern's masks, or None if changes can't be detected.

    Options that only change scores are not part of the key.
    """
    slopes, score = options["slopes"], options["score_mod"]
    is_learned = slopes is not None and slopes.requires_grad
    read = {**options, "cap": None, "score_mod": score is None}
    read["slopes"] = None if is_learned else slopes
    return key_of([words, torch.get_default_dtype(), *read.values()])


def _known(words: str, options: Mapping[str, Any]) -> engine_choice.PatternChoices:
    alike = words, *(
        tuple(one.shape) if isinstance(one, torch.Tensor)
        else getattr(one, "__code__", type(one) if callable(one) else str(one))
        for one in options.values()
    )  # fmt: skip
    return _KNOWN.setdefault(alike, engine_choice.PatternChoices())


def forget_masks() -> str:
    """Release the masks that are kept for later calls; return a description of them."""
    found = "masks of attention()" if _MASKS else ""
    _MASKS.clear()
    return found


# --- the key of a mask: equal keys, equal masks ---


def key_of(value: Any, within: tuple[FunctionType, ...] = ()) -> object:
    """Return a key that changes with `value`, or with the values that a function reads.

    Return None if changes can't be detected. `within` are the enclosing functions.
    """
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind in (tuple, list):
        keys = [key_of(one, within) for one in value]
        return None if None in keys else (kind, *keys)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return _of_tensor(value)
    if kind is FunctionType:
        return "itself" if value in within else _of_function(value, (*within, value))
    return value.__name__ if value is torch or value is math else None


def _of_tensor(value: torch.Tensor) -> object:
    if value.device.type == "cpu" and value.nbytes <= COMPARED_BYTES:
        numbers = value.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        return value.dtype, value.shape, numbers.numpy().tobytes()
    # The tensor itself, so that no other tensor reuses its memory.
    return None if value.requires_grad or value.is_inference() else (value, version(value))


def _of_function(function: FunctionType, within: tuple[FunctionType, ...]) -> object:
    """Return a function's code, and the keys of the closure and global values that it reads."""
    code, names = function.__code__, function.__globals__
    is_known = all(name in names or name in PURE for name in code.co_names)
    if not is_known or any(isinstance(one, type(code)) for one in code.co_consts):
        return None
    try:
        cells = [one.cell_contents for one in function.__closure__ or ()]
    except ValueError:  # a variable without a value
        return None
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    read = [names[name] for name in code.co_names if name in names]
    keys = key_of([cells, defaults, read], within)
    return keys and (code, keys)
