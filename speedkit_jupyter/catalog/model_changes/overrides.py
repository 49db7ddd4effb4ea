"""Override properties of modules, tensors and optimizers; undo the overrides in any order.

The last undo restores the original state; a value that the user changed under a plan is kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import update_wrapper
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from speedkit_jupyter.torchglue.modules import CAST, LOAD, MODULES, PARAMETERS

Optimizers = Sequence["torch.optim.Optimizer"]
MISSING = object()


class Property(ABC):
    """A property of one kind of object: a weight's strides, a tensor's device, and so on.

    Overrides must not keep objects alive, so an `original` must not refer to its object.
    The `optimizers` passed to methods may have state that changes with the object.
    """

    def __init__(self) -> None:
        self._layers: MutableMapping[Any, Layers] = WeakIdKeyDictionary()

    @abstractmethod
    def found(self, thing: Any, optimizers: Optimizers) -> Any:
        """Return the object's current state, with everything that `put_back` restores."""

    @abstractmethod
    def put(self, thing: Any, override: Any, optimizers: Optimizers) -> None:
        """Apply an override to the object."""

    @abstractmethod
    def holds(self, thing: Any, override: Any) -> bool:
        """Return whether the override is still in force, unchanged by the user."""

    @abstractmethod
    def put_back(self, thing: Any, original: Any, override: Any, optimizers: Optimizers) -> None:
        """Restore the original if the override is still in force; trained values stay."""

    def adopted(self, thing: Any, original: Any, optimizers: Optimizers) -> Any:
        """Return the new original state after the user has changed the property."""
        return self.found(thing, optimizers)

    @contextmanager
    def overriding(
        self, overrides: Iterable[tuple[Any, Any]], search: Callable[[], Optimizers] = tuple
    ) -> Iterator[PropertyOverride]:
        """Apply all (object, override) pairs in the block, and undo them on any exit.

        Yield the PropertyOverride. `search` finds optimizers, at the start and again at the end.
        """
        layer = PropertyOverride(self, search)
        try:
            for thing, override in overrides:
                layer.add(thing, override)
            thing = override = overrides = ()  # local names would keep objects alive
            yield layer
        finally:
            layer.close()

    def original(self, thing: Any) -> Any:
        """Return the object's state without plans; MISSING if no plan overrides the object."""
        known = self._layers
        layers = known.get(thing) if known else None  # weak dicts are slow to look up even if empty
        return MISSING if layers is None else layers.original

    def every(self) -> MutableMapping[Any, Layers]:
        """Return the overridden objects, each with its `Layers`."""
        return self._layers


class Layers:
    """An object's original state and its overrides, the active override last."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.overrides: dict[PropertyOverride, Any] = {}

    @property
    def top(self) -> Any:
        return next(reversed(self.overrides.values()))


class PropertyOverride:
    """One plan's overrides of a property; `things` are the overridden objects."""

    def __init__(self, owner: Property, search: Callable[[], Optimizers]) -> None:
        self._property, self._search = owner, search
        self._optimizers = search()
        self.things: MutableMapping[Any, None] = WeakIdKeyDictionary()

    def add(self, thing: Any, override: Any) -> None:
        """Apply an override on top of earlier ones; a user's change becomes the original state."""
        every, owner = self._property.every(), self._property
        layers = every.get(thing)
        if layers is None:
            layers = every[thing] = Layers(owner.found(thing, self._optimizers))
        elif not owner.holds(thing, layers.top):
            layers = every[thing] = Layers(owner.adopted(thing, layers.original, self._optimizers))
        self.things[thing] = None
        layers.overrides[self] = override
        owner.put(thing, override, self._optimizers)

    def renew(self, thing: Any, optimizers: Optimizers = ()) -> None:
        """Apply the active override again after an optimizer was created or loaded its state."""
        layers, owner = self._property.every().get(thing), self._property
        if layers is not None and self in layers.overrides:
            if not owner.holds(thing, layers.top):
                layers.original = owner.adopted(thing, layers.original, optimizers)
            owner.put(thing, layers.top, optimizers)

    def close(self) -> None:
        """Undo all overrides, the last one first; errors are raised after all are undone."""
        self._optimizers = self._search() if self.things else ()
        with ExitStack() as stack:
            for thing in self.things:
                stack.callback(self._withdraw, thing)

    def _withdraw(self, thing: Any) -> None:
        every, owner = self._property.every(), self._property
        layers = every.get(thing)
        if layers is None or self not in layers.overrides:
            return  # a later plan has already adopted the user's change
        top = layers.top
        is_held = owner.holds(thing, top)  # before `del`: `holds` may read `overrides`
        del layers.overrides[self]
        if not layers.overrides:
            every.pop(thing, None)
            owner.put_back(thing, layers.original, top, self._optimizers)
        elif is_held:
            owner.put(thing, layers.top, self._optimizers)


def put_back_entries(holder: Any, values: Mapping[str, Any]) -> None:
    """Write the original `values` into a dict; delete the keys whose original value is MISSING."""
    for name, value in values.items():
        if value is MISSING:
            holder.pop(name, None)
        else:
            holder[name] = value


# A place in a module: a table (PARAMETERS, MODULES, or empty for `__dict__`), and a key in it.
Slot = tuple[str, str]
FORWARD: Slot = ("", "forward")


class StandIn(NamedTuple):
    """A replacement, and the word under which reports count it."""

    value: Any
    word: str


Slots = Mapping[Slot, StandIn]


class Method:
    """A function as a method of one module; deep copies and pickles have the class's method."""

    def __init__(self, function: FunctionType, module: torch.nn.Module, name: str) -> None:
        own = getattr(module, name)  # has the name and signature that libraries read
        update_wrapper(self, vars(own)["__wrapped__"] if isinstance(own, Method) else own)
        self.function, self._module, self._name = function, module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._module.__dict__.get(self._name) is self:
            return self.function(self._module, *args, **kwargs)
        # After the plan, only shallow copies have this method; they share the module's parts.
        return getattr(type(self._module), self._name)(self._module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, self._name)


class Swapped(Property):
    """The replaced parameters, modules and methods of a module."""

    def __init__(self) -> None:
        super().__init__()
        self._current: MutableMapping[Any, dict[Slot, StandIn]] = WeakIdKeyDictionary()

    def current(self, thing: torch.nn.Module) -> dict[Slot, StandIn]:
        """Return the plans' replacements that the user has not overwritten."""
        known = self._current.get(thing, {})
        return {slot: one for slot, one in known.items() if _is_there(thing, slot, one.value)}

    def found(self, thing: torch.nn.Module, optimizers: Optimizers) -> dict[Slot, Any]:
        kinds = (PARAMETERS, MODULES)
        return {(kind, name): v for kind in kinds for name, v in vars(thing)[kind].items()}

    def put(self, thing: torch.nn.Module, override: Slots, optimizers: Optimizers) -> None:
        layers = self.every()[thing]
        wanted: dict[Slot, StandIn] = {}
        for each in layers.overrides.values():
            wanted.update(each)
        if any(kind == PARAMETERS for kind, _ in wanted):
            wanted |= {("", name): StandIn(function, "files") for name, function in OWN.items()}
        for slot in self.current(thing).keys() - wanted.keys():
            _put(thing, slot, layers.original.get(slot, MISSING))
        for slot, one in wanted.items():
            _put(thing, slot, one.value)
        self._current[thing] = wanted

    def holds(self, thing: torch.nn.Module, override: Slots) -> bool:
        return override.keys() <= self.current(thing).keys()

    def put_back(self, thing: Any, original: Any, override: Slots, optimizers: Optimizers) -> None:
        for slot in self.current(thing):
            _put(thing, slot, original.get(slot, MISSING))

    def adopted(self, thing: Any, original: Any, optimizers: Optimizers) -> Any:
        ours = {slot: original.get(slot, MISSING) for slot in self.current(thing)}
        return self.found(thing, optimizers) | ours


# A global, because several plans may replace parts of the same module.
SWAPPED = Swapped()


def _own_state_dict(module: torch.nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the `state_dict()` with the user's parameters: files are the same as without plans."""
    found: dict[str, Any] = type(module).state_dict(module, *args, **kwargs)
    for kind, name in SWAPPED.current(module):
        if kind == PARAMETERS:
            own = SWAPPED.original(module)[kind, name]
            key = f"{kwargs.get('prefix', '')}{name}"
            found[key] = own if kwargs.get("keep_vars") else own.detach()
    return found


def _load_own(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    return_own_parameters(module)
    getattr(type(module), LOAD)(module, *args, **kwargs)


def _cast_own(module: torch.nn.Module, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Cast or move replacements and the user's parameters, which are restored after the plan."""
    for kind, name in SWAPPED.current(module):
        if kind == PARAMETERS:
            own = SWAPPED.original(module)[kind, name]
            own.data = function(own.data)
    return getattr(type(module), CAST)(module, function, *args, **kwargs)


# Methods that save, load, cast and move the user's parameters while they are replaced.
OWN = {"state_dict": _own_state_dict, LOAD: _load_own, CAST: _cast_own}


def return_own_parameters(module: torch.nn.Module) -> None:
    """Restore the user's parameters permanently, for code that is about to write to parameters."""
    for slot in SWAPPED.current(module):
        if slot[0] == PARAMETERS:
            _put(module, slot, SWAPPED.original(module)[slot])


def _merge_own(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    base: Any = module.base_layer
    return_own_parameters(base)
    type(module).merge(module, *args, **kwargs)  # type: ignore[attr-defined]


# The override for a peft module, which may merge its adapter into replaced parameters.
MERGE: Slots = {("", "merge"): StandIn(_merge_own, "adapters")}


def _holder(module: torch.nn.Module, slot: Slot) -> dict[str, Any]:
    return vars(module)[slot[0]] if slot[0] else vars(module)  # type: ignore[no-any-return]


def _is_there(module: torch.nn.Module, slot: Slot, value: Any) -> bool:
    """Return whether the slot holds the value, or a cast or moved copy of the value."""
    now = _holder(module, slot).get(slot[1], MISSING)
    if not slot[0]:
        return bool((now.function if isinstance(now, Method) else now) == value)
    is_special = slot[0] == PARAMETERS and type(now) is not torch.nn.Parameter
    return now is value or (is_special and type(now) is type(value))


def _put(module: torch.nn.Module, slot: Slot, value: Any) -> None:
    holder, (kind, name) = _holder(module, slot), slot
    if kind == MODULES and value is not None and holder.get(name) is not None:
        value.train(holder[name].training)  # the user may have called train() or eval()
    if not kind and isinstance(value, FunctionType):
        value = Method(value, module, name)
    put_back_entries(holder, {name: value})
