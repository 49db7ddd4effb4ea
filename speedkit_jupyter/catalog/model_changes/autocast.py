"""Cast frozen weights once under autocast, and keep transformers' static caches in one dtype.

Under autocast, models with rotary embeddings compute float32 keys but bf16 values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeGuard

import torch
from torch.nn import functional

from speedkit_jupyter.catalog.model_changes.calls import (
    HOOKS,
    Call,
    has_own_forward,
    is_compiled_by_user,
)
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue.modules import has_global_hooks, parameter_table
from speedkit_jupyter.torchglue.storage import marks

# Frozen weights of at least this many elements are cast once. Speed-up for inputs of 16 rows: 1.16×
# with 1,024 × 1,024 elements, 1.0× with 512 × 512 (AMD EPYC, 2 cores).
CAST_ONCE = 1 << 19
# One object per plan that lowers precision. A global, because plans share one patch of `Cache`.
_PLANS: list[object] = []


class CastOnce(Call):
    """A call of a frozen linear layer under CPU autocast; the cast weight is kept for later calls.

    The results have the same bits, because autocast computes with the same rounded weight. The
    weight is cast again after each change that `marks` detects.
    """

    _known: tuple[list[object], torch.Tensor] = [], torch.empty(0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.acts() or not torch.is_autocast_enabled("cpu"):
            return self.below(*args, **kwargs)
        layer = self.module
        weight = parameter_table(layer).get("weight")
        is_watched = has_global_hooks() or any(getattr(layer, kind) for kind in HOOKS)
        if is_watched or len(args) != 1 or kwargs or not _is_frozen(weight):
            return self.below(*args, **kwargs)
        dtype = torch.get_autocast_dtype("cpu")
        now: list[object] = [id(weight), dtype, *marks([weight])]
        if self._known[0] != now:
            with torch.inference_mode(False):
                self._known = now, weight.detach().to(dtype)
        return _product(layer, args[0], self._known[1])


def _is_linear(layer: torch.nn.Module) -> bool:
    """Return whether the layer's own class is torch's Linear or transformers' Conv1D (GPT-2)."""
    kind = type(layer)
    is_conv1d = (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
    return kind is torch.nn.Linear or is_conv1d


def _product(layer: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the layer's result with `weight` instead of its own, as `forward` computes it."""
    if type(layer) is torch.nn.Linear:
        return functional.linear(x, weight, layer.bias)
    rows = torch.addmm(layer.bias, x.view(-1, x.size(-1)), weight)
    return rows.view(*x.shape[:-1], weight.shape[1])


def _is_frozen(weight: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a weight is a large, frozen, contiguous float32 parameter on a CPU."""
    if type(weight) is not torch.nn.Parameter or weight.requires_grad or not weight.is_cpu:
        return False
    is_plain = weight.dtype is torch.float32 and weight.is_contiguous()
    return is_plain and weight.numel() >= CAST_ONCE


def cast_once(model: torch.nn.Module, notes: dict[str, str], only_in: int | None) -> list[Call]:
    """Return a CastOnce for each large, frozen, unpatched, uncompiled linear layer; add a note."""
    every = filter(_is_linear, model.modules())
    linears = [one for one in every if _is_frozen(parameter_table(one).get("weight"))]
    plain = [one for one in linears if not has_own_forward(one) and not is_compiled_by_user(one)]
    if plain:
        notes["precision"] = f"cast once: {count(len(plain), 'frozen linear layer')}"
    return [CastOnce(one, notes, only_in) for one in plain]


@contextmanager
def caches_in_one_dtype() -> Iterator[None]:
    """Patch transformers' static caches in the block, to store keys in the dtype of the values."""
    kind: Any = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    if kind is None or not hasattr(kind, "is_compileable"):
        yield
        return
    original, plan = kind.update, object()

    @wraps(original)
    def update(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        is_mixed = keys.dtype != values.dtype and self.is_compileable
        return original(self, keys.to(values.dtype) if is_mixed else keys, values, *args, **kwargs)

    if not _PLANS:
        update.stands_in_for = original  # type: ignore[attr-defined]
        kind.update = update
    _PLANS.append(plan)
    try:
        yield
    finally:
        _PLANS.remove(plan)
        if not _PLANS and hasattr(kind.update, "stands_in_for"):
            kind.update = kind.update.stands_in_for
