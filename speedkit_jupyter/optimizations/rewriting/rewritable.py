"""Modules that can be made others in place: which they are, and how they become that and come back.

The module object stays, with its parameters, its hooks and its name; so whoever holds it, an
optimizer or a second place in the model, has the other one too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from speedkit_jupyter.optimizations.properties.wishes import MISSING, Optimizers, Property
from speedkit_jupyter.optimizations.rewriting import in_place

if TYPE_CHECKING:
    import torch

Kind = Literal["instance_norm", "gelu", "inplace"]
GROUPS = 8


class Rewritable(NamedTuple):
    """One module: its path in the model, and what it becomes. `holder` is the attribute of a GELU
    that says how it computes.
    """

    kind: Kind
    path: str
    change: str
    holder: str = ""


class Other(NamedTuple):
    """Another class for a module, with the attributes that it needs."""

    kind: type
    attributes: Mapping[str, Any]


def rewritable(model: torch.nn.Module) -> Iterator[tuple[Rewritable, torch.nn.Module]]:
    """What can be made another module, or is one by a plan; a shared one at each of its places.

    Of activations in place it is the Sequential that is another.
    """
    from torch import nn

    exact = _exact()
    kinds = {*exact, nn.InstanceNorm2d, nn.Sequential}
    for path, module in _places(model):
        own = _own_class(module)
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
        if child is not None and all(child is not one for one in (*above, module)):
            yield from _places(child, f"{path}.{name}" if path else name, (*above, module))


def is_rewritten(module: torch.nn.Module) -> bool:
    """Whether a plan has made another one of it."""
    return any(rewrite.original(module) is not MISSING for rewrite in (CLASS, APPROXIMATION))


def _own_class(module: torch.nn.Module) -> type:
    """The one beneath all plans."""
    original = CLASS.original(module)
    return type(module) if original is MISSING else original


def group_norm(norm: torch.nn.InstanceNorm2d) -> Other:
    """What an InstanceNorm2d becomes, with its weight, bias and eps."""
    from torch import nn

    return Other(nn.GroupNorm, {"num_groups": GROUPS, "num_channels": norm.num_features})


def _is_instance_norm(module: Any) -> bool:
    """One with weights and without running statistics, of channels that make whole groups."""
    from torch import nn

    if _own_class(module) is not nn.InstanceNorm2d:
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
    if type(module) not in exact or not (holder := _holder(module)):
        return ""
    original = APPROXIMATION.original(module)
    value = module.__dict__[holder] if original is MISSING else original
    return holder if value == exact[type(module)] else ""


def _holder(gelu: torch.nn.Module) -> str:
    """The attribute that says how a GELU computes: torch's own, or that of Hugging Face's."""
    return next((name for name in ("approximate", "act") if name in gelu.__dict__), "")


class Class(Property):
    """The class of a module."""

    def found(self, thing: torch.nn.Module, optimizers: Optimizers) -> type:
        """As it is."""
        return type(thing)

    def put(self, thing: torch.nn.Module, wish: Other, optimizers: Optimizers) -> None:
        """The same object in another class."""
        thing.__dict__.update(wish.attributes)
        object.__setattr__(thing, "__class__", wish.kind)

    def holds(self, thing: torch.nn.Module, wish: Other) -> bool:
        """Whether it is in that class still."""
        return type(thing) is wish.kind

    def put_back(
        self, thing: torch.nn.Module, original: type, wish: Other, optimizers: Optimizers
    ) -> None:
        """In its own class, without what the other one needed."""
        if self.holds(thing, wish):
            object.__setattr__(thing, "__class__", original)
            for name in wish.attributes:
                thing.__dict__.pop(name, None)


class Approximation(Property):
    """How a GELU computes: what it has in one attribute."""

    def found(self, thing: torch.nn.Module, optimizers: Optimizers) -> Any:
        """The word of torch's, the function of Hugging Face's."""
        return thing.__dict__[_holder(thing)]

    def put(self, thing: torch.nn.Module, wish: Any, optimizers: Optimizers) -> None:
        """By tanh."""
        setattr(thing, _holder(thing), wish)

    def holds(self, thing: torch.nn.Module, wish: Any) -> bool:
        """Whether it does so still."""
        return bool(thing.__dict__[_holder(thing)] == wish)

    def put_back(
        self, thing: torch.nn.Module, original: Any, wish: Any, optimizers: Optimizers
    ) -> None:
        """As it did."""
        if self.holds(thing, wish):
            setattr(thing, _holder(thing), original)


def by_tanh(gelu: torch.nn.Module) -> Any:
    """What stands in its attribute then."""
    from torch import nn

    is_word = _holder(gelu) == "approximate"
    return "tanh" if is_word else partial(nn.functional.gelu, approximate="tanh")


# State at module level, on purpose: what a module is is known for the whole process.
CLASS, APPROXIMATION = Class(), Approximation()
