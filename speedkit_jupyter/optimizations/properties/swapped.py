"""What stands in for parts of modules, or on single modules, for a while."""

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

# Where a module has it (`_parameters`, `_modules`), and its name there.
Slot = tuple[str, str]


class Swapped(Property):
    """What stands in the slots of a module; a wish is a mapping of slots to what stands in."""

    def found(self, thing: torch.nn.Module, optimizers: Optimizers) -> dict[Slot, Any]:
        """All that it has there."""
        kinds = ("_parameters", "_modules")
        return {(kind, name): v for kind in kinds for name, v in thing.__dict__[kind].items()}

    def put(self, thing: torch.nn.Module, wish: Mapping[Slot, Any], optimizers: Optimizers) -> None:
        """The latest wish for each slot; the user's own where no plan has one any more."""
        layers = self.layers(thing)
        wanted = dict(layers.original) if layers is not None else {}
        for each in layers.wishes.values() if layers is not None else ():
            wanted.update(each)
        for slot in self._ours(thing) | wish.keys():
            _put(thing, slot, wanted[slot])

    def holds(self, thing: torch.nn.Module, wish: Mapping[Slot, Any]) -> bool:
        """Whether all of it stands there still."""
        return all(_at(thing, slot) is value for slot, value in wish.items())

    def put_back(
        self, thing: torch.nn.Module, original: Any, wish: Mapping[Slot, Any], optimizers: Any
    ) -> None:
        """The user's own, wherever something of ours still stands."""
        for slot in self._ours(thing):
            _put(thing, slot, original[slot])

    def adopted(
        self, thing: torch.nn.Module, original: Any, wish: Mapping[Slot, Any], optimizers: Any
    ) -> dict[Slot, Any]:
        """The user's own, with what the user has put there since."""
        now = self.found(thing, optimizers)
        return now | {slot: original[slot] for slot in self._ours(thing)}

    def _ours(self, thing: torch.nn.Module) -> set[Slot]:
        """The slots where something of ours stands now."""
        now = self.found(thing, ())
        return {slot for slot, value in now.items() if stands_for(value)}


# State at module level, on purpose: what stands in is known for the whole process.
SWAPPED = Swapped()
MARK = "_speedkit_stands_in"


def stand_in(value: Any, name: str) -> Any:
    """Return the parameter or module, marked by the name of the entry that has made it."""
    value.__dict__[MARK] = name
    return value


def stands_for(value: Any) -> str:
    """Return the name of the entry that has put it there; empty for the user's own."""
    return str(getattr(value, "__dict__", {}).get(MARK, ""))


def _at(module: torch.nn.Module, slot: Slot) -> Any:
    return module.__dict__[slot[0]].get(slot[1], MISSING)


def _put(module: torch.nn.Module, slot: Slot, value: Any) -> None:
    before = _at(module, slot)
    if slot[0] == "_modules" and value is not None and before is not None:
        value.train(before.training)  # as the user has switched the other one since
    module.__dict__[slot[0]][slot[1]] = value


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
        return all(_on(thing, name) == value for name, value in wish.items())

    def put_back(
        self, thing: torch.nn.Module, original: Any, wish: Mapping[str, Any], optimizers: Any
    ) -> None:
        """What it had, wherever it is still as wished."""
        ours = [name for name, value in wish.items() if _on(thing, name) == value]
        put_back_entries(thing.__dict__, {name: original.get(name, MISSING) for name in ours})


# State at module level, on purpose: what lies on a module is known for the whole process.
PATCHED = Patched()


def _on(module: torch.nn.Module, name: str) -> Any:
    value = module.__dict__.get(name, MISSING)
    return getattr(value, "__func__", value)
