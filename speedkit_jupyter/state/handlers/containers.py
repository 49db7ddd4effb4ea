"""Handlers for dicts, lists, sets, attributes, slots, classes, modules and TorchScript."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch

from speedkit_jupyter.state.handlers.base import (
    CompositeHandler,
    CopyBudget,
    NamedParts,
    StateHandler,
    attribute_dict,
)
from speedkit_jupyter.state.handlers.names import Replay
from speedkit_jupyter.state.ownership import is_installed, is_ours, is_the_users_class
from speedkit_jupyter.torchglue import modules
from speedkit_jupyter.torchglue.private import tree_flatten


class Dicts(CompositeHandler):
    """Handle a dict's entries, their order, and a defaultdict's factory. Plans' entries stay."""

    types = (dict,)

    def copy(self, instance: Any, copies: CopyBudget) -> list[Any]:
        """Return a list: the factory or None, then all keys, then all values."""
        base = _base(instance)
        factory = instance.default_factory if isinstance(instance, defaultdict) else None
        return [factory, *base.keys(instance), *base.values(instance)]

    def put_back(self, instance: Any, memory: list[Any]) -> None:
        base, (factory, *parts) = _base(instance), memory
        of_a_plan = [pair for pair in base.items(instance) if _is_a_plans(pair[1])]
        base.clear(instance)
        found = zip(parts[: len(parts) // 2], parts[len(parts) // 2 :], strict=True)
        for key, value in [*(pair for pair in found if not _is_a_plans(pair[1])), *of_a_plan]:
            base.__setitem__(instance, key, value)
        if isinstance(instance, defaultdict):
            instance.default_factory = factory

    def replace(self, instance: Any, old: Any, new: Any) -> None:
        base = _base(instance)
        for key in [key for key, value in base.items(instance) if value is old]:
            base.__setitem__(instance, key, new)


def _base(instance: Any) -> Any:
    """Return OrderedDict or dict, whose own methods are used, not a user's subclass's methods."""
    return OrderedDict if isinstance(instance, OrderedDict) else dict


def _is_a_plans(value: Any) -> bool:
    """Return whether SpeedKit made this value, such as a plan's hook; False for a `Replay`."""
    function = value.__func__ if type(value) is MethodType else value
    for _ in range(4):
        if type(function) is not FunctionType:
            break
        if is_ours(function.__globals__.get("__name__", "")):
            return True
        function = vars(function).get("__wrapped__")
    return is_ours(getattr(type(value), "__module__", "")) and type(value) is not Replay


class Lists(CompositeHandler):
    """Handle the elements of lists and deques, in order."""

    types = (list, deque)

    def copy(self, instance: Any, copies: CopyBudget) -> list[Any]:
        iterate = list.__iter__ if isinstance(instance, list) else deque.__iter__
        return list(iterate(instance))

    def put_back(self, instance: Any, memory: list[Any]) -> None:
        base: Any = list if isinstance(instance, list) else deque
        base.clear(instance)
        base.extend(instance, memory)

    def replace(self, instance: Any, old: Any, new: Any) -> None:
        parts = self.copy(instance, CopyBudget())
        self.put_back(instance, [new if part is old else part for part in parts])


class Sets(CompositeHandler):
    """Handle sets. Elements are compared by identity, because users may define `__eq__`."""

    types = (set,)

    def copy(self, instance: Any, copies: CopyBudget) -> dict[int, Any]:
        return {id(element): element for element in set.__iter__(instance)}

    def put_back(self, instance: Any, memory: dict[int, Any]) -> None:
        set.clear(instance)
        set.update(instance, memory.values())


class Attributes(StateHandler):
    """Handle the class and `__dict__` of an instance; `Dicts` handles the entries of that dict."""

    def recognizes(self, cls: type) -> bool:
        return cls.__dictoffset__ != 0 and not issubclass(cls, type | ModuleType)

    def children(self, instance: Any) -> Iterable[Any]:
        attributes = attribute_dict(instance)
        return () if attributes is None else (attributes,)

    def copy(self, instance: Any, copies: CopyBudget) -> tuple[type, dict[str, Any] | None]:
        return type(instance), attribute_dict(instance)

    def put_back(self, instance: Any, memory: tuple[type, dict[str, Any] | None]) -> None:
        cls, attributes = memory
        if type(instance) is not cls:
            object.__setattr__(instance, "__class__", cls)
        if attribute_dict(instance) is not attributes:
            object.__setattr__(instance, "__dict__", attributes)


class Scripted(StateHandler):
    """Handle the C++ attributes of TorchScript modules; only tensors are compared by identity."""

    types = (torch.jit.ScriptModule,)

    def children(self, instance: Any) -> Iterable[Any]:
        return [*modules.script_attributes(instance).values(), *modules.script_constants(instance)]

    def copy(self, instance: Any, copies: CopyBudget) -> dict[str, Any]:
        return modules.script_attributes(instance)

    def same(self, instance: Any, memory: dict[str, Any]) -> bool:
        now, form = tree_flatten(modules.script_attributes(instance))
        before, form_before = tree_flatten(memory)
        pairs = [(a, b) for a, b in zip(now, before, strict=False) if a is not b]
        has_tensors = any(isinstance(part, torch.Tensor) for pair in pairs for part in pair)
        return bool(form == form_before and not has_tensors and all(a == b for a, b in pairs))

    def put_back(self, instance: Any, memory: dict[str, Any]) -> None:
        for name, value in memory.items():
            modules.set_script_attribute(instance, name, value)


class Slots(NamedParts):
    """Handle `__slots__`, through descriptors because frozen classes refuse `setattr`."""

    def recognizes(self, cls: type) -> bool:
        return not issubclass(cls, type) and any("__slots__" in vars(base) for base in cls.__mro__)

    def copy(self, instance: Any, copies: CopyBudget) -> dict[Any, Any]:
        found = {}
        for slot in slots(type(instance)):
            with suppress(AttributeError):  # no value yet
                found[slot] = slot.__get__(instance)
        return found

    def write(self, instance: Any, name: Any, value: Any) -> None:
        name.__set__(instance, value)

    def delete(self, instance: Any, name: Any) -> None:
        name.__delete__(instance)


def slots(cls: type) -> Iterator[Any]:
    """Yield the descriptors of the `__slots__` of a class and its bases."""
    for base in cls.__mro__:
        if "__slots__" in vars(base):
            yield from (s for s in vars(base).values() if isinstance(s, MemberDescriptorType))


class Definitions(NamedParts):
    """Handle attributes of the user's classes and modules, except names that begin with `__`."""

    types = (type, ModuleType)

    def children(self, instance: Any) -> Iterable[Any]:
        if isinstance(instance, type) and is_the_users_class(instance):
            return [*instance.__bases__, *vars(instance).values()]
        return super().children(instance)

    def copy(self, instance: Any, copies: CopyBudget) -> dict[str, Any]:
        if isinstance(instance, type):
            is_the_users = is_the_users_class(instance)
        else:  # `NamesHandler` handles the notebook's names
            home: Any = vars(instance).get("__name__")
            is_the_users = isinstance(home, str) and home != "__main__" and not is_installed(home)
        return {
            name: value
            for name, value in (list(vars(instance).items()) if is_the_users else ())
            if name[:2] != "__" and not isinstance(value, MemberDescriptorType)
        }

    def write(self, instance: Any, name: str, value: Any) -> None:
        base = type if isinstance(instance, type) else ModuleType
        base.__setattr__(instance, name, value)

    def delete(self, instance: Any, name: str) -> None:
        base = type if isinstance(instance, type) else ModuleType
        base.__delattr__(instance, name)
