"""What a module becomes in place, and how it comes back.

The module object stays, with its parameters, its hooks and its name; so whoever holds it, an
optimizer or a second place in the model, has the other one too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from speedkit_jupyter.optimizations.properties.wishes import MISSING, Optimizers, Property

if TYPE_CHECKING:
    import torch

GROUPS = 8


class Other(NamedTuple):
    """Another class for a module, with the attributes that it needs."""

    kind: type
    attributes: Mapping[str, Any]


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
        return thing.__dict__[holder_of(thing)]

    def put(self, thing: torch.nn.Module, wish: Any, optimizers: Optimizers) -> None:
        """By tanh."""
        setattr(thing, holder_of(thing), wish)

    def holds(self, thing: torch.nn.Module, wish: Any) -> bool:
        """Whether it does so still."""
        return bool(thing.__dict__[holder_of(thing)] == wish)

    def put_back(
        self, thing: torch.nn.Module, original: Any, wish: Any, optimizers: Optimizers
    ) -> None:
        """As it did."""
        if self.holds(thing, wish):
            setattr(thing, holder_of(thing), original)


# State at module level, on purpose: what a module is is known for the whole process.
CLASS, APPROXIMATION = Class(), Approximation()


def is_rewritten(module: torch.nn.Module) -> bool:
    """Whether a plan has made another one of it."""
    return any(rewrite.original(module) is not MISSING for rewrite in (CLASS, APPROXIMATION))


def own_class(module: torch.nn.Module) -> type:
    """The one beneath all plans."""
    original = CLASS.original(module)
    return type(module) if original is MISSING else original


def group_norm(norm: torch.nn.InstanceNorm2d) -> Other:
    """What an InstanceNorm2d becomes, with its weight, bias and eps."""
    from torch import nn

    return Other(nn.GroupNorm, {"num_groups": GROUPS, "num_channels": norm.num_features})


def by_tanh(gelu: torch.nn.Module) -> Any:
    """What stands in its attribute then."""
    from torch import nn

    is_word = holder_of(gelu) == "approximate"
    return "tanh" if is_word else partial(nn.functional.gelu, approximate="tanh")


def holder_of(gelu: torch.nn.Module) -> str:
    """The attribute that says how a GELU computes: torch's own, or that of Hugging Face's."""
    return next((name for name in ("approximate", "act") if name in gelu.__dict__), "")
