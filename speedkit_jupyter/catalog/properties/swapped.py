"""What stands in for parts of modules for a while: parameters, modules, methods and settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from speedkit_jupyter.catalog.properties.overrides import (
    MISSING,
    Optimizers,
    Property,
    put_back_entries,
)
from speedkit_jupyter.torchglue.modules import MODULES, PARAMETERS

# The table that has it (PARAMETERS, MODULES, empty for its own attributes), and its name.
Slot = tuple[str, str]


class StandIn(NamedTuple):
    """What is in the place of another, and the word by which it is counted.

    A method is a plain function, so that it doesn't hold its module.
    """

    value: Any
    word: str


Slots = Mapping[Slot, StandIn]


class Method:
    """A function as a method of one module; copies and files of the module have the class's own."""

    def __init__(self, function: FunctionType, module: torch.nn.Module, name: str) -> None:
        self.function, self._module, self._name = function, module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self._module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, self._name)


class Swapped(Property):
    """What stands in the slots of a module."""

    def __init__(self) -> None:
        super().__init__()
        self._standing: MutableMapping[Any, dict[Slot, StandIn]] = WeakIdKeyDictionary()

    def standing(self, thing: torch.nn.Module) -> dict[Slot, StandIn]:
        """Return what plans have put there, and what has not been replaced since."""
        known = self._standing.get(thing, {})
        return {slot: one for slot, one in known.items() if _is_there(thing, slot, one.value)}

    def in_model(self, model: torch.nn.Module) -> Iterator[StandIn]:
        """Yield what stands in anywhere in the model."""
        for module in model.modules():
            yield from self.standing(module).values()

    def found(self, thing: torch.nn.Module, optimizers: Optimizers) -> dict[Slot, Any]:
        plain = (bool, int, float, str, type(None))
        own = {("", name): v for name, v in vars(thing).items() if isinstance(v, plain)}
        kinds = (PARAMETERS, MODULES)
        return own | {(kind, name): v for kind in kinds for name, v in vars(thing)[kind].items()}

    def put(self, thing: torch.nn.Module, override: Slots, optimizers: Optimizers) -> None:
        layers = self.every()[thing]
        wanted: dict[Slot, StandIn] = {}
        for each in layers.overrides.values():
            wanted.update(each)
        for slot in self.standing(thing).keys() - wanted.keys():
            _put(thing, slot, layers.original.get(slot, MISSING))
        for slot, one in wanted.items():
            _put(thing, slot, one.value)
        self._standing[thing] = wanted

    def holds(self, thing: torch.nn.Module, override: Slots) -> bool:
        return override.keys() <= self.standing(thing).keys()

    def put_back(self, thing: Any, original: Any, override: Slots, optimizers: Optimizers) -> None:
        for slot in self.standing(thing):
            _put(thing, slot, original.get(slot, MISSING))

    def adopted(self, thing: Any, original: Any, optimizers: Optimizers) -> Any:
        ours = {slot: original.get(slot, MISSING) for slot in self.standing(thing)}
        return self.found(thing, optimizers) | ours


# State at module level, on purpose: what stands in is known for the whole process.
SWAPPED = Swapped()


def _holder(module: torch.nn.Module, slot: Slot) -> dict[str, Any]:
    return vars(module)[slot[0]] if slot[0] else vars(module)  # type: ignore[no-any-return]


def _is_there(module: torch.nn.Module, slot: Slot, value: Any) -> bool:
    """Return whether it stands there, or a cast or moved copy of the same class of tensors."""
    now = _holder(module, slot).get(slot[1], MISSING)
    if not slot[0]:
        return bool((now.function if isinstance(now, Method) else now) == value)
    is_special = slot[0] == PARAMETERS and type(now) is not torch.nn.Parameter
    return now is value or (is_special and type(now) is type(value))


def _put(module: torch.nn.Module, slot: Slot, value: Any) -> None:
    holder, (kind, name) = _holder(module, slot), slot
    if kind == MODULES and value is not None and holder.get(name) is not None:
        value.train(holder[name].training)  # as the user has switched the other one since
    if not kind and isinstance(value, FunctionType):
        value = Method(value, module, name)
    put_back_entries(holder, {name: value})
