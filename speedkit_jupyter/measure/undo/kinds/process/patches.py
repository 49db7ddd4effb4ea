"""What code binds anew in modules and classes that are not the user's: `F.relu = ...`.

Libraries set much of their own there, in the middle of a step, too: what is loaded when it is
first needed, caches, counters. That stays. Put back is what the user's code gives a value by that
name, or gives one of its own functions; what another library replaced is named.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection, Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import (
    MISSING,
    PACKAGE,
    attribute_dict,
    is_the_plans,
)
from speedkit_jupyter.measure.undo.kinds.code.names import namespaces
from speedkit_jupyter.measure.undo.kinds.code.spelled import Words
from speedkit_jupyter.measure.undo.kinds.objects.instances import OF_EVERY_CLASS
from speedkit_jupyter.measure.undo.kinds.origin import (
    is_the_users_class,
    is_the_users_function,
    is_the_users_module,
)
from speedkit_jupyter.measure.undo.kinds.settings import CHANGED, failure, refill

Space = ModuleType | type
# Patched most often, also where no code names them: modules, and those of all classes in them.
MODULES = (
    "builtins", "math", "random", "time", "os", "os.path", "json", "warnings", "io", "copy",
    "torch", "torch.nn.functional", "torch.nn.init", "torch.autograd", "torch.linalg", "numpy",
    "numpy.random",
)  # fmt: skip
OF_CLASSES = ("torch.nn", "torch.optim", "torch.utils.data", "torch.amp")
# More are not looked at.
MOST = 3000
OF_EVERY_MODULE = frozenset(
    [
        "__warningregistry__", "__builtins__", "__spec__", "__loader__", "__cached__",
        "__file__", "__path__", "__package__", "__name__",
    ]
)  # fmt: skip
CONTAINERS = (list, dict, set)
REGISTRY = "__warningregistry__"


class Patches:
    """Names of modules and classes that code can reach, and what they mean at one moment."""

    def __init__(self, objects: Collection[Any]) -> None:
        self.words = Words(objects)
        self.spaces = _reached(_spaces(objects, self.words), self.words.named)
        self._saved = [(space, dict(vars(space))) for space in self.spaces]
        self._contents = [
            (value, list(value.items() if type(value) is dict else value))
            for value in self._named_containers()
        ]
        self._streams = [(stream, dict(vars(stream))) for stream in _streams()]
        self._modules = dict(sys.modules)
        self._registries = [
            (names, dict(registry) if isinstance(registry := names.get(REGISTRY), dict) else None)
            for names in namespaces(objects)
        ]

    def _named_containers(self) -> list[Any]:
        """Lists, dicts and sets of libraries that the user's code names."""
        leave = (id(sys.modules), id(sys.path_importer_cache))
        values = {
            id(value): value
            for _, names in self._saved
            for name in names.keys() & self.words.named
            if type(value := names[name]) in CONTAINERS and id(value) not in leave
        }
        return list(values.values())

    def restore(self) -> Iterator[tuple[str, str]]:
        """Bind again what the user's code has bound anew; gives what stays changed, and why."""
        for space, saved in self._saved:
            now = vars(space)
            if len(now) == len(saved) and all(map(operator.is_, now.values(), saved.values())):
                continue
            names = [*saved, *(name for name in now if name not in saved)]
            for name in names:
                was, present = saved.get(name, MISSING), vars(space).get(name, MISSING)
                if was is not present and not _is_of_every(space, name):
                    yield from self._put_back(space, name, was, present)
        for value, items in self._contents:
            _fill(value, items)
        for stream, saved in self._streams:
            self._put_back_attributes(vars(stream), saved)
        self._put_back_modules()
        for names, registry in self._registries:
            _forget_warnings(names, registry)

    def _put_back(self, space: Space, name: str, was: Any, now: Any) -> Iterator[tuple[str, str]]:
        if is_the_plans(was) or is_the_plans(now):
            return
        title = f"{_title(space)}.{name}"
        if not (name in self.words.stored or _is_the_users(now)):
            if callable(was) and callable(now) and not {_home(now), PACKAGE} & {_home(was), ""}:
                yield title, CHANGED
            return
        if was is MISSING and _comes_when_needed(space, now):
            return
        try:
            _bind(space, name, was)
        except Exception as error:
            yield title, failure(error)

    def _put_back_attributes(self, now: dict[str, Any], saved: dict[str, Any]) -> None:
        """Those that the user's code gives a value, of an object that is not the user's."""
        for name in self.words.stored & (now.keys() | saved.keys()):
            if now.get(name, MISSING) is not saved.get(name, MISSING):
                if name in saved:
                    now[name] = saved[name]
                else:
                    del now[name]

    def _put_back_modules(self) -> None:
        """Those that code put under a name in `sys.modules` itself, or took away."""
        words = self.words
        for name in sys.modules.keys() - self._modules.keys():
            spec = getattr(sys.modules[name], "__spec__", None)
            if name in words.modules and getattr(spec, "name", None) != name:
                del sys.modules[name]
        for name, module in self._modules.items():
            if name in words.modules and sys.modules.get(name) is not module:
                sys.modules[name] = module


def _spaces(objects: Collection[Any], words: Words) -> Iterator[Space]:
    """Where code begins: modules and classes that it names, classes of objects, and the usual."""
    for instance in objects:
        if issubclass(type(instance), ModuleType) or issubclass(type(instance), type):
            yield instance
    for cls in {type(instance) for instance in objects}:
        yield from cls.__mro__
    yield from words.namespaces()
    for name in MODULES:
        if name in sys.modules:
            yield sys.modules[name]
    for name in OF_CLASSES:
        inside = vars(sys.modules[name]) if name in sys.modules else {}
        yield from (value for value in list(inside.values()) if isinstance(value, type))
    import torch

    yield torch.Tensor


def _streams() -> list[Any]:
    """What is printed to: the process's own, be it the notebook's, each once."""
    streams = (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)
    return list(
        {id(owner): owner for owner in streams if attribute_dict(owner) is not None}.values()
    )


def _reached(begin: Iterable[Space], names: set[str]) -> list[Space]:
    """And the modules and classes that stand in them under a name that the code spells."""
    waiting, spaces = list(begin), dict[int, Space]()
    while waiting and len(spaces) < MOST:
        space = waiting.pop()
        if id(space) in spaces or _is_the_users_own(space):
            continue
        spaces[id(space)] = space
        inside = vars(space)
        values = [inside[name] for name in names & inside.keys()]
        waiting += [v for v in values if issubclass(type(v), ModuleType | type)]
    return list(spaces.values())


def _is_the_users_own(space: Any) -> bool:
    """Other kinds see to those, and to ours nobody needs to."""
    home = vars(space).get("__module__" if isinstance(space, type) else "__name__")
    if home == "__main__" or (isinstance(home, str) and home.partition(".")[0] == PACKAGE):
        return True
    if isinstance(space, type):
        return is_the_users_class(space)
    return is_the_users_module(space)


def _is_of_every(space: Space, name: str) -> bool:
    return name in OF_EVERY_MODULE or (isinstance(space, type) and name in OF_EVERY_CLASS)


def _is_the_users(value: Any) -> bool:
    """A function or class that the user wrote, or an object of one."""
    value = value.__func__ if type(value) in {MethodType, staticmethod, classmethod} else value
    value = getattr(value, "fget", value) if type(value) is property else value
    if type(value) is FunctionType:
        return is_the_users_function(value)
    return is_the_users_class(value if isinstance(value, type) else type(value))


def _home(value: Any) -> str:
    """The package that something callable comes from; nothing where that is not known."""
    home = getattr(value, "__module__", None)
    return home.partition(".")[0].lstrip("_") if isinstance(home, str) else ""


def _comes_when_needed(space: Space, value: Any) -> bool:
    """A module inside it, or a part of its own that its `__getattr__` has fetched."""
    if isinstance(space, type):
        return False
    lazy = "__getattr__" in vars(space) or type(space) is not ModuleType
    own = space.__name__.partition(".")[0]
    return isinstance(value, ModuleType) or (lazy and _home(value) == own)


def _bind(space: Space, name: str, value: Any) -> None:
    if not isinstance(space, type):
        names = vars(space)
        if value is MISSING:
            del names[name]
        else:
            names[name] = value
    elif value is MISSING:
        type.__delattr__(space, name)
    else:
        type.__setattr__(space, name, value)


def _fill(value: Any, items: list[Any]) -> None:
    now = list(value.items() if type(value) is dict else value)
    if len(now) != len(items) or not all(map(_is_same_item, now, items)):
        refill(value, items)


def _forget_warnings(names: Any, registry: dict[Any, Any] | None) -> None:
    """Those that the step's code was given once are to be given again."""
    if registry is None:
        names.pop(REGISTRY, None)
    elif names.get(REGISTRY) != registry:
        refill(names[REGISTRY], list(registry.items()))


def _is_same_item(now: Any, saved: Any) -> bool:
    if type(now) is tuple and type(saved) is tuple and len(now) == len(saved) == 2:
        return now[0] is saved[0] and now[1] is saved[1]
    return now is saved


def _title(space: Space) -> str:
    home = f"{space.__module__}." if isinstance(space, type) else ""
    return f"{home}{space.__name__}"
