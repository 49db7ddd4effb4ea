"""What stands in for parts of modules, or on single modules, for a while."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from speedkit_jupyter.optimizations.properties.overrides import (
    MISSING,
    Optimizers,
    Property,
    put_back_entries,
)

if TYPE_CHECKING:
    import torch

# Where a module has it (`_parameters`, `_modules`), and its name there.
Slot = tuple[str, str]


class StandIn(NamedTuple):
    """A parameter or module in the place of another, and the word by which it is counted."""

    value: Any
    word: str


Slots = Mapping[Slot, StandIn]


class Swapped(Property):
    """What stands in the slots of a module."""

    def __init__(self) -> None:
        super().__init__()
        self._standing: MutableMapping[Any, dict[Slot, StandIn]] | None = None

    def standing(self, thing: torch.nn.Module) -> dict[Slot, StandIn]:
        """Return what plans have put there, and what has not been replaced since."""
        known = {} if self._standing is None else self._standing.get(thing, {})
        return {slot: one for slot, one in known.items() if _is_there(thing, slot, one.value)}

    def found(self, thing: torch.nn.Module, optimizers: Optimizers) -> dict[Slot, Any]:
        """Return all that it has there."""
        kinds = ("_parameters", "_modules")
        return {(kind, name): v for kind in kinds for name, v in thing.__dict__[kind].items()}

    def put(self, thing: torch.nn.Module, override: Slots, optimizers: Optimizers) -> None:
        """Put the latest override into each slot; the user's own where no plan has one."""
        layers = self.layers(thing)
        wanted: dict[Slot, StandIn] = {}
        for each in layers.overrides.values() if layers is not None else ():
            wanted.update(each)
        for slot in self.standing(thing).keys() - wanted.keys():
            _put(thing, slot, layers.original[slot] if layers is not None else None)
        for slot, one in wanted.items():
            _put(thing, slot, one.value)
        from torch.utils.weak import WeakIdKeyDictionary

        self._standing = WeakIdKeyDictionary() if self._standing is None else self._standing
        self._standing[thing] = wanted

    def holds(self, thing: torch.nn.Module, override: Slots) -> bool:
        """Whether all of it stands there still."""
        return override.keys() <= self.standing(thing).keys()

    def put_back(
        self, thing: torch.nn.Module, original: Any, override: Slots, optimizers: Optimizers
    ) -> None:
        """Put the user's own back, wherever something of ours still stands."""
        for slot in self.standing(thing):
            _put(thing, slot, original[slot])

    def adopted(
        self, thing: torch.nn.Module, original: Any, override: Slots, optimizers: Any
    ) -> Any:
        """Return the user's own, with what the user has put there since."""
        now = self.found(thing, optimizers)
        return now | {slot: original[slot] for slot in self.standing(thing)}


# State at module level, on purpose: what stands in is known for the whole process.
SWAPPED = Swapped()


def _is_there(module: torch.nn.Module, slot: Slot, value: Any) -> bool:
    """Whether it stands there, or a cast or moved copy of the same class of tensors."""
    import torch

    now = module.__dict__[slot[0]].get(slot[1])
    is_special = slot[0] == "_parameters" and type(now) is not torch.nn.Parameter
    return now is value or (is_special and type(now) is type(value))


def _put(module: torch.nn.Module, slot: Slot, value: Any) -> None:
    before = module.__dict__[slot[0]].get(slot[1])
    if slot[0] == "_modules" and value is not None and before is not None:
        value.train(before.training)  # as the user has switched the other one since
    module.__dict__[slot[0]][slot[1]] = value


class Patched(Property):
    """Attributes of a module. An override has their values by name, methods as plain functions, so
    that it does not hold its module.
    """

    def found(self, thing: torch.nn.Module, optimizers: Optimizers) -> dict[str, Any]:
        """Return its own plain values."""
        plain = (bool, int, float, str, type(None))
        return {name: v for name, v in thing.__dict__.items() if isinstance(v, plain)}

    def beneath(self, thing: torch.nn.Module) -> dict[str, Any]:
        """Return what lies on the module without what plans have put there."""
        layers, own = self.layers(thing), dict(thing.__dict__)
        if layers is not None:
            names = {name for override in layers.overrides.values() for name in override}
            put_back_entries(own, {n: layers.original.get(n, MISSING) for n in names})
        return own

    def put(self, thing: torch.nn.Module, override: Mapping[str, Any], optimizers: Any) -> None:
        """Set the values; functions become methods of it."""
        for name, value in override.items():
            is_method = isinstance(value, FunctionType)
            thing.__dict__[name] = value.__get__(thing) if is_method else value

    def holds(self, thing: torch.nn.Module, override: Mapping[str, Any]) -> bool:
        """Whether all of it is as it was put."""
        return all(_on(thing, name) == value for name, value in override.items())

    def put_back(
        self, thing: torch.nn.Module, original: Any, override: Mapping[str, Any], optimizers: Any
    ) -> None:
        """Put back what it had, wherever it is still as overridden."""
        ours = [name for name, value in override.items() if _on(thing, name) == value]
        put_back_entries(thing.__dict__, {name: original.get(name, MISSING) for name in ours})


# State at module level, on purpose: what lies on a module is known for the whole process.
PATCHED = Patched()


def _on(module: torch.nn.Module, name: str) -> Any:
    value = module.__dict__.get(name, MISSING)
    return getattr(value, "__func__", value)
