"""Parts of a model that `rewrites` can put another module of torch's in place of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from speedkit_jupyter.optimizations.properties.calls import is_watched

if TYPE_CHECKING:
    import torch

Kind = Literal["instance_norm", "gelu", "inplace"]
GROUPS = 8
# Their results are new tensors, which their own backward passes don't need.
BEFORE = {"Linear", "GroupNorm", "LayerNorm"} | {
    f"{kind}{n}d" for kind in ("Conv", "ConvTranspose", "BatchNorm") for n in (1, 2, 3)
}
# Their gradients follow from their results.
ACTIVATIONS = ("ReLU", "ReLU6", "Hardtanh")


class Rewritable(NamedTuple):
    """One place: its path in the model, and what the module there becomes."""

    kind: Kind
    path: str
    change: str


def rewritable(model: torch.nn.Module) -> Iterator[tuple[Rewritable, torch.nn.Module, str]]:
    """Yield each place with the module that holds it and its name there, a shared one once for
    each module that holds it.
    """
    from torch import nn

    for path, parent in model.named_modules():
        children = parent._modules
        for name, child in children.items():
            place = f"{path}.{name}" if path else name
            if child is None or is_watched(child):
                continue
            if _is_exact_gelu(child):
                yield Rewritable("gelu", place, f"{type(child).__name__} -> tanh"), parent, name
            elif _is_instance_norm(child):
                change = f"InstanceNorm2d -> GroupNorm({GROUPS})"
                yield Rewritable("instance_norm", place, change), parent, name
        if type(parent) is nn.Sequential:
            for name in _in_place(children):
                place = f"{path}.{name}" if path else name
                change = f"{type(children[name]).__name__} in place"
                yield Rewritable("inplace", place, change), parent, name


def _is_exact_gelu(module: Any) -> bool:
    """torch's own without an approximation, and the one of transformers."""
    from torch import nn

    if type(module) is nn.GELU:
        return bool(module.approximate == "none")
    theirs = getattr(sys.modules.get("transformers.activations"), "GELUActivation", None)
    return type(module) is theirs and module.__dict__.get("act") is nn.functional.gelu


def _is_instance_norm(module: Any) -> bool:
    """One with weights and without running statistics, of channels that make whole groups."""
    from torch import nn

    if type(module) is not nn.InstanceNorm2d or module.num_features % GROUPS:
        return False
    return module.affine and not module.track_running_stats


def _in_place(children: Any) -> Iterator[str]:
    """The names of activations behind a layer that nothing else looks at."""
    from torch import nn

    for (_, before), (name, module) in pairwise(children.items()):
        known = type(before) in {getattr(nn, layer) for layer in BEFORE}
        able = type(module) in {getattr(nn, one) for one in ACTIVATIONS} and not module.inplace
        if known and able and not is_watched(before) and not is_watched(module):
            yield name
