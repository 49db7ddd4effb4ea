"""Methods and settings that stand on single modules for a while, as patches put them there."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.properties.wishes import (
    MISSING,
    Optimizers,
    Property,
    put_back_entries,
)

if TYPE_CHECKING:
    import torch


class Patched(Property):
    """Attributes of a module; a wish has their values by name, methods as plain functions, so that
    it does not hold its module.
    """

    def found(self, thing: torch.nn.Module, optimizers: Optimizers) -> dict[str, Any]:
        """Its own plain values."""
        plain = (bool, int, float, str, type(None))
        return {name: v for name, v in thing.__dict__.items() if isinstance(v, plain)}

    def beneath(self, thing: torch.nn.Module) -> dict[str, Any]:
        """Return what lies on the module without what plans have put there."""
        layers, own = self.layers(thing), dict(thing.__dict__)
        if layers is not None:
            names = {name for wish in layers.wishes.values() for name in wish}
            put_back_entries(own, {n: layers.original.get(n, MISSING) for n in names})
        return own

    def put(self, thing: torch.nn.Module, wish: Mapping[str, Any], optimizers: Any) -> None:
        """Functions become methods of it."""
        for name, value in wish.items():
            is_method = isinstance(value, FunctionType)
            thing.__dict__[name] = value.__get__(thing) if is_method else value

    def holds(self, thing: torch.nn.Module, wish: Mapping[str, Any]) -> bool:
        """Whether all of it is as it was put."""
        return all(_at(thing, name) == value for name, value in wish.items())

    def put_back(
        self, thing: torch.nn.Module, original: Any, wish: Mapping[str, Any], optimizers: Any
    ) -> None:
        """What it had, wherever it is still as wished."""
        ours = [name for name, value in wish.items() if _at(thing, name) == value]
        put_back_entries(thing.__dict__, {name: original.get(name, MISSING) for name in ours})


# State at module level, on purpose: what lies on a module is known for the whole process.
PATCHED = Patched()


def _at(module: torch.nn.Module, name: str) -> Any:
    value = module.__dict__.get(name, MISSING)
    return getattr(value, "__func__", value)
