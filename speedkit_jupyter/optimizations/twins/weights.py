"""Weights with a twin of fewer bits, which multiplies in their stead.

The user's own parameter stays in its place: the same object, the same bits in the same memory. Only
its class is another meanwhile, one whose `F.linear` takes the twin. So whoever else holds the
parameter (a tied embedding, an optimizer, a `state_dict()`, a copy, a file) has what it would have
without a plan.

A twin is a tensor, which was made of the weight's values: for inference, so that where gradients
are recorded the weights themselves multiply. Or it is a layer, which reads the weight and gives it
its gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.properties.wishes import Optimizers, Property
from speedkit_jupyter.optimizations.twins.recipe import Recipe, recipe_of, seen
from speedkit_jupyter.optimizations.twins.twinned import OURS, twinned

if TYPE_CHECKING:
    import torch


class Twins(Property):
    """Which recipe a weight's twin is made by."""

    def found(self, thing: torch.Tensor, optimizers: Optimizers) -> type:
        """Its class."""
        return type(thing)

    def put(self, thing: Any, wish: Recipe, optimizers: Optimizers) -> None:
        """The twin first, then the class that asks for it."""
        thing._speedkit_twin = wish.twin(thing)
        thing._speedkit_recipe, thing._speedkit_seen = wish, seen(thing)
        thing.__class__ = twinned()

    def holds(self, thing: torch.Tensor, wish: Recipe) -> bool:
        """Whether it has a twin of this recipe."""
        return recipe_of(thing) is wish

    def put_back(self, thing: Any, original: type, wish: Recipe, optimizers: Optimizers) -> None:
        """Its class, and nothing of ours on it."""
        if type(thing) is twinned():
            thing.__class__ = original
        for name in OURS:
            thing.__dict__.pop(name, None)


# State at module level, on purpose: what lies on a weight is known for the whole process.
TWINS = Twins()
