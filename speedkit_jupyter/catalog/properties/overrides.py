"""What several plans override on one object, in layers that are taken back in any order.

As with flags: what is still applied stays in force, the last plan to go leaves what was found,
and what the user changed meanwhile is the user's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

Optimizers = Sequence["torch.optim.Optimizer"]
MISSING = object()


class Property(ABC):
    """One property of one kind of object: how a weight lies, where it is, an optimizer's settings.

    Nothing here keeps an object alive, so an `original` must not hold its object. `optimizers` are
    those whose state goes with the object.
    """

    def __init__(self) -> None:
        self._layers: MutableMapping[Any, Layers] = WeakIdKeyDictionary()

    @abstractmethod
    def found(self, thing: Any, optimizers: Optimizers) -> Any:
        """Return its original: all that `put_back` needs."""

    @abstractmethod
    def put(self, thing: Any, override: Any, optimizers: Optimizers) -> None:
        """Make it what a plan wants."""

    @abstractmethod
    def holds(self, thing: Any, override: Any) -> bool:
        """Return whether it is as `put` made it, rather than changed by the user since."""

    @abstractmethod
    def put_back(self, thing: Any, original: Any, override: Any, optimizers: Optimizers) -> None:
        """Make it what was found, wherever it is still as overridden; the values stay."""

    def adopted(self, thing: Any, original: Any, optimizers: Optimizers) -> Any:
        """Return the original once the user has changed something since it was found."""
        return self.found(thing, optimizers)

    @contextmanager
    def overriding(
        self, overrides: Iterable[tuple[Any, Any]], search: Callable[[], Optimizers] = tuple
    ) -> Iterator[PropertyOverride]:
        """Put every (object, override) into force for the block, and take all back, whatever fails.
        `search` finds the optimizers, now and at the end.
        """
        layer = PropertyOverride(self, search)
        try:
            for thing, override in overrides:
                layer.add(thing, override)
            thing = override = overrides = ()  # what is named here lives as long as the plan
            yield layer
        finally:
            layer.close()

    def original(self, thing: Any) -> Any:
        """Return what was found before the first plan that is in force; MISSING without one."""
        known = self._layers
        layers = known.get(thing) if known else None  # to ask even an empty one takes a while
        return MISSING if layers is None else layers.original

    def every(self) -> MutableMapping[Any, Layers]:
        """Return the layers of each object that plans override."""
        return self._layers


class Layers:
    """The overrides for one object, the one in force last, and its `original`. Keeps no object."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.overrides: dict[PropertyOverride, Any] = {}

    @property
    def top(self) -> Any:
        return next(reversed(self.overrides.values()))


class PropertyOverride:
    """What one plan overrides, on `things`."""

    def __init__(self, owner: Property, search: Callable[[], Optimizers]) -> None:
        self._property, self._search = owner, search
        self._optimizers = search()
        self.things: MutableMapping[Any, None] = WeakIdKeyDictionary()

    def add(self, thing: Any, override: Any) -> None:
        """Put an override into force, over those of other plans."""
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
        """Put it once more where parts of the object are new: a loaded state, another optimizer."""
        layers, owner = self._property.every().get(thing), self._property
        if layers is not None and self in layers.overrides:
            if not owner.holds(thing, layers.top):
                layers.original = owner.adopted(thing, layers.original, optimizers)
            owner.put(thing, layers.top, optimizers)

    def close(self) -> None:
        """Take every override back, the last one first. A failure goes on once all are done."""
        self._optimizers = self._search() if self.things else ()
        with ExitStack() as stack:
            for thing in self.things:
                stack.callback(self._withdraw, thing)

    def _withdraw(self, thing: Any) -> None:
        every, owner = self._property.every(), self._property
        layers = every.get(thing)
        if layers is None or self not in layers.overrides:
            return  # the user took it over, and a later plan noticed
        top = layers.top
        del layers.overrides[self]
        if not layers.overrides:
            every.pop(thing, None)
            owner.put_back(thing, layers.original, top, self._optimizers)
        elif owner.holds(thing, top):
            owner.put(thing, layers.top, self._optimizers)


def put_back_entries(holder: Any, values: Mapping[str, Any]) -> None:
    """Put back the entries of a dict, MISSING standing for none."""
    for name, value in values.items():
        if value is MISSING:
            holder.pop(name, None)
        else:
            holder[name] = value
