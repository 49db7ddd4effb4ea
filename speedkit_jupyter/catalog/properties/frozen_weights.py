"""Frozen weights under autocast on the CPU: cast once, instead of in each call."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch.nn import functional

from speedkit_jupyter.catalog.properties.calls import (
    HOOKS,
    Call,
    has_own_forward,
    is_compiled_by_user,
)
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue.modules import has_global_hooks, parameter_table
from speedkit_jupyter.torchglue.storage import marks

# Elements of a frozen weight from which a cast takes longer than a check for changes: 20 and 8 µs.
CAST_ONCE = 1 << 18


class CastOnce(Call):
    """A call under autocast of a frozen linear layer on the CPU, whose weight is cast only once.

    The results have the same bits, because autocast computes with the same rounded weight. The
    weight is cast again after each change that `marks` sees.
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
    """Return whether the layer is torch's Linear, or the Conv1D of GPT-2 in transformers."""
    kind = type(layer)
    is_conv1d = (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
    return kind is torch.nn.Linear or is_conv1d


def _product(layer: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute the layer with another weight, as its own `forward` does."""
    if type(layer) is torch.nn.Linear:
        return functional.linear(x, weight, layer.bias)
    rows = torch.addmm(layer.bias, x.view(-1, x.size(-1)), weight)
    return rows.view(*x.shape[:-1], weight.shape[1])


def _is_frozen(weight: Any) -> TypeGuard[torch.Tensor]:
    """Return whether autocast casts this weight at each call, for longer than a check of it."""
    if type(weight) is not torch.nn.Parameter or weight.requires_grad or not weight.is_cpu:
        return False
    is_plain = weight.dtype is torch.float32 and weight.is_contiguous()
    return is_plain and weight.numel() >= CAST_ONCE


def cast_once(model: torch.nn.Module, notes: dict[str, str], only_in: int | None) -> list[Call]:
    """Return the layers of the frozen linear layers, which a report counts."""
    every = filter(_is_linear, model.modules())
    linears = [one for one in every if _is_frozen(parameter_table(one).get("weight"))]
    plain = [one for one in linears if not has_own_forward(one) and not is_compiled_by_user(one)]
    if plain:
        notes["precision"] = f"cast once: {count(len(plain), 'frozen linear layer')}"
    return [CastOnce(one, notes, only_in) for one in plain]
