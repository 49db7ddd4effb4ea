"""Modules that can be made others in place: which they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from speedkit_jupyter.optimizations.properties.wishes import MISSING
from speedkit_jupyter.optimizations.rewriting import in_place
from speedkit_jupyter.optimizations.rewriting.others import (
    APPROXIMATION,
    GROUPS,
    holder_of,
    own_class,
)

if TYPE_CHECKING:
    import torch

Kind = Literal["instance_norm", "gelu", "inplace"]


class Rewritable(NamedTuple):
    """One module: its path in the model, and what it becomes. `holder` is the attribute of a GELU
    that says how it computes.
    """

    kind: Kind
    path: str
    change: str
    holder: str = ""


def rewritable(model: torch.nn.Module) -> Iterator[tuple[Rewritable, torch.nn.Module]]:
    """What can be made another module, or is one by a plan; a shared one at each of its places.

    Of activations in place it is the Sequential that is another.
    """
    from torch import nn

    exact = _exact()
    kinds = {*exact, nn.InstanceNorm2d, nn.Sequential}
    for path, module in _places(model):
        own = own_class(module)
        if own not in kinds or "forward" in module.__dict__:
            continue
        if holder := _exact_gelu(module, exact):
            yield Rewritable("gelu", path, f"{type(module).__name__} -> tanh", holder), module
        elif _is_instance_norm(module):
            yield (
                Rewritable("instance_norm", path, f"InstanceNorm2d -> GroupNorm({GROUPS})"),
                module,
            )
        elif own is nn.Sequential:
            sequential = cast("nn.Sequential", module)
            for index in in_place.activations(sequential):
                name = type(sequential[index]).__name__
                place = f"{path}.{index}" if path else str(index)
                yield Rewritable("inplace", place, f"{name} in place"), module


def _places(
    module: torch.nn.Module, path: str = "", above: tuple[torch.nn.Module, ...] = ()
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every place in a model with its module; one that holds what it lies in ends there."""
    yield path, module
    for name, child in module._modules.items():
        if child is not None and all(
            child is not module_above for module_above in (*above, module)
        ):
            yield from _places(child, f"{path}.{name}" if path else name, (*above, module))


def _is_instance_norm(module: Any) -> bool:
    """One with weights and without running statistics, of channels that make whole groups."""
    from torch import nn

    if own_class(module) is not nn.InstanceNorm2d:
        return False
    fits = module.num_features % GROUPS == 0
    return module.affine and not module.track_running_stats and fits


def _exact() -> dict[Any, Any]:
    """Classes of GELUs, and what stands in the attribute of an exact one."""
    from torch import nn

    transformers = sys.modules.get("transformers.activations")
    exact: dict[Any, Any] = {nn.GELU: "none"}
    if transformers is not None:
        exact[getattr(transformers, "GELUActivation", None)] = nn.functional.gelu
    return exact


def _exact_gelu(module: Any, exact: Mapping[Any, Any]) -> str:
    """The attribute by which it is exact beneath all plans; empty where it is no such GELU."""
    if type(module) not in exact or not (holder := holder_of(module)):
        return ""
    original = APPROXIMATION.original(module)
    value = module.__dict__[holder] if original is MISSING else original
    return holder if value == exact[type(module)] else ""
