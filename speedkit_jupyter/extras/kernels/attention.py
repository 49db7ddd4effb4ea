"""Attention by a pattern: computes the scores that the pattern lets through, and few others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from speedkit_jupyter.extras.data.free import MemoryHolder
from speedkit_jupyter.extras.kernels import engines
from speedkit_jupyter.extras.kernels.blocks import AttentionInputs, Shape
from speedkit_jupyter.extras.kernels.dependencies import key_of
from speedkit_jupyter.extras.kernels.engine_choice import (
    KEPT,
    SIZES,
    EngineChoice,
    PatternChoices,
    Prepared,
)
from speedkit_jupyter.extras.kernels.patterns import (
    MaskMod,
    ScoreMod,
    composed,
    names_in,
    slopes_of,
)
from speedkit_jupyter.support.exceptions import ArgumentError, did_you_mean
from speedkit_jupyter.support.tracebacks import hide_internal_frames
from speedkit_jupyter.torchglue.private import is_transforming

ENGINES = ("auto", "dense", "chunks", "flex")
# By what they are made from, those used last at the end.
_MASKS: OrderedDict[object, dict[Any, Any]] = OrderedDict()
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
    them, as torch's FlexAttention takes them; their indices are tensors that broadcast. A mask is
    kept until something that it was made from changes, where that can be told.

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
    device = shape.device.type
    has_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if has_autocast and shape.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (one.to(dtype) for one in inputs[:3])
        inputs = inputs._replace(q=q, k=k, v=v)
        shape = inputs.shape
    options["device"] = shape.device
    if "alibi" in words and options["slopes"] is None:
        options["slopes"] = torch.tensor(slopes_of(shape.heads))
    tensors = {name: one for name, one in options.items() if isinstance(one, torch.Tensor)}
    is_plain = not is_transforming() and all(map(_is_plain, (*inputs[:3], *tensors.values())))
    key = _key(words, options) if is_plain else None
    is_steady, masks = key in _MASKS, _MASKS.get(key, {})
    here = options | {name: _moved(name, tensors[name], shape.device, masks) for name in tensors}
    pattern = composed(names_in(words, here), here)
    if not is_plain:
        return engines.at_once(inputs, pattern)
    if key is not None:
        _keep(key, masks)
    prepared = Prepared(pattern, masks, _known(words, options), is_steady)
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


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether its values can be looked at, and others like it can be made."""
    is_known = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_known and not tensor.is_meta and tensor.numel() > 0


def _key(words: str, options: Mapping[str, Any]) -> object:
    """Return what masks are made from, None where that may change unseen; what only scores are
    made from is read at each call.
    """
    slopes, score = options["slopes"], options["score_mod"]
    is_learned = slopes is not None and slopes.requires_grad
    read = {**options, "cap": None, "score_mod": score is None}
    read["slopes"] = None if is_learned else slopes
    return key_of([words, torch.get_default_dtype(), *read.values()])


def _keep(key: object, masks: dict[Any, Any]) -> None:
    _MASKS[key] = masks
    _MASKS.move_to_end(key)
    while len(_MASKS) > KEPT:
        _MASKS.popitem(last=False)


def _moved(name: str, tensor: torch.Tensor, device: torch.device, masks: dict[Any, Any]) -> Any:
    """Return it on the device, where it is kept with the masks."""
    if tensor.requires_grad or tensor.device == device:
        return tensor.to(device)
    moved = masks.get(name)
    if moved is None:
        moved = masks[name] = tensor.to(device)
    return moved


def _known(words: str, options: Mapping[str, Any]) -> PatternChoices:
    """Return what patterns share that are measured together."""
    alike = words, *(
        tuple(one.shape) if isinstance(one, torch.Tensor)
        else getattr(one, "__code__", type(one) if callable(one) else str(one))
        for one in options.values()
    )  # fmt: skip
    return _KNOWN.setdefault(alike, PatternChoices())


def kept_masks() -> MemoryHolder:
    """Return what keeps masks for later calls."""
    lost = "the next call makes them again"
    return MemoryHolder("masks of attention()", lambda: [_MASKS], _MASKS.clear, lost)


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
