"""Find the objects that code can reach. HANDLERS has a handler for each kind of object."""

from __future__ import annotations

import functools
import io
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch

from speedkit_jupyter.state import ownership
from speedkit_jupyter.state.handlers import containers, names
from speedkit_jupyter.state.handlers.arrays_and_generators import Arrays, Buffers, Generators
from speedkit_jupyter.state.handlers.base import StateHandler, attribute_dict
from speedkit_jupyter.state.handlers.tensors import Gradients, Tensors
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.torchglue.modules import script_constants

LruCache = type(functools.lru_cache(None)(len))


class Leading(StateHandler):
    """Handle objects that have no state but refer to other objects, such as bound methods."""

    has_state = False

    def __init__(self, behind: Callable[[Any], Iterable[Any]], *types: type) -> None:
        self.types, self._behind = types, behind

    def children(self, instance: Any) -> Iterable[Any]:
        return [part for part in self._behind(instance) if part is not None]


def _bound(method: Any) -> Iterable[Any]:
    owner = getattr(method, "__self__", None)
    return getattr(method, "__func__", None), None if isinstance(owner, types.ModuleType) else owner


class Unknown(StateHandler):
    """Handle objects whose state can't be read: it is in C, or in another thread or process."""

    has_state = False

    def recognizes(self, cls: type) -> bool:
        """Return whether instances may change; False for `object` or classes that hash by value."""
        own: Any = cls.__hash__
        return cls is not object and (own is None or own is object.__hash__)

    def is_unrestorable(self, instance: Any) -> bool:
        if is_a(instance, io.IOBase) and instance.closed:
            return False
        return instance is not sys.stdout and instance is not sys.stderr


class Caches(StateHandler):
    """Handle the user's `lru_cache` objects, whose entries can't be restored."""

    types = (LruCache,)
    has_state = False

    def is_unrestorable(self, instance: Any) -> bool:
        function = getattr(instance, "__wrapped__", None)
        return type(function) is types.FunctionType and ownership.is_the_users_function(function)


BOUND = (
    types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType, staticmethod, classmethod,
)  # fmt: skip
# Handlers are in the order of restoring: holders before their parts, gradients last.
HANDLERS: tuple[StateHandler, ...] = (
    names.NamesHandler(), names.Cells(), names.Functions(), containers.Definitions(),
    containers.Attributes(), containers.Slots(), containers.Dicts(), containers.Lists(),
    containers.Sets(), containers.Scripted(), Buffers(), Tensors(), Arrays(),
    Generators(), names.Iterators(),
    Leading(tuple.__iter__, tuple),
    Leading(frozenset.__iter__, frozenset),
    Leading(_bound, *BOUND),
    Leading(lambda p: (p.fget, p.fset, p.fdel), property),
    Leading(lambda p: (p.func, *p.args, p.keywords), functools.partial, functools.partialmethod),
    Leading(lambda reference: (weakref.ref.__call__(reference),), weakref.ref),
    Leading(script_constants, torch.jit.ScriptFunction),
    Leading(lambda own: (vars(own),), threading.local),
    Caches(), Gradients(),
)  # fmt: skip
UNKNOWN, REPLAYED = Unknown(), Leading(lambda replay: (replay.original,), names.Replay)
# Objects that these packages implement in C have no user state.
INNER = frozenset([
    "torch", "numpy", "builtins", "functools", "operator", "_operator", "_struct", "_abc",
    "_collections", "collections", "_ctypes", "pydantic_core", "weakref", "_multiprocessing",
])  # fmt: skip


def handlers_of(cls: type) -> tuple[StateHandler, ...]:
    """Return the handlers of a class's instances; () for plain values and for machinery."""
    try:
        handlers = tuple(handler for handler in HANDLERS if handler.recognizes(cls))
    except Exception:  # the metaclass's own comparison or hash fails
        return (UNKNOWN,)
    if issubclass(cls, names.Replay):
        return (REPLAYED,)
    alone = (names.NamesHandler, names.Iterators)
    if own := tuple(handler for handler in handlers if isinstance(handler, alone)):
        return own
    if ownership.is_elsewhere(cls):
        return (UNKNOWN,)
    if _is_left_alone(cls):
        return ()
    plain = (containers.Attributes, containers.Slots)
    known = any(not isinstance(handler, plain) for handler in handlers)
    if known or str(cls.__module__).partition(".")[0] in INNER or not UNKNOWN.recognizes(cls):
        return handlers
    hides_memory = cls.__basicsize__ > _size_in_python(cls)
    return (*handlers, UNKNOWN) if not handlers or hides_memory else handlers


def _is_left_alone(cls: type) -> bool:
    """Return whether walks skip instances as machinery; False for classes and thread-locals."""
    home = cls.__dict__.get("__module__", "builtins")
    if issubclass(cls, (type, threading.local)) or not ownership.is_machinery(home):
        return False
    kinds = (torch.nn.Module, torch.Tensor, torch.optim.Optimizer)  # these have state
    return not (ownership.INNER_MODULES.match(home) and issubclass(cls, kinds))


def _size_in_python(cls: type) -> int:
    """Return the bytes of an instance's header, slots, and pointers to dict and weak references."""
    slots = len([*containers.slots(cls)])
    pointers = slots + (cls.__weakrefoffset__ > 0) + (cls.__dictoffset__ > 0)
    return object.__basicsize__ + pointers * (object.__basicsize__ // 2)


# A walk stops after it has found this number of objects, which takes about a second.
MOST_OBJECTS = 100_000


class Walk:
    """Objects reachable from `roots`, except plain values and machinery; `found` has them by id.

    `near` omits objects that are reachable only through classes or whole namespaces. `cut` has
    objects after MOST_OBJECTS, whose parts are unknown. `holders` has the objects that refer to
    each iterator. `elsewhere` names objects with threads, processes or unreadable parts.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.found: dict[int, Any] = {}
        self.near: list[Any] = []
        self.cut: list[Any] = []
        self.elsewhere: list[str] = []
        self.holders: dict[int, list[tuple[Any, StateHandler]]] = {}
        self._known: dict[int, tuple[type, tuple[StateHandler, ...]]] = {}
        self._before: dict[int, int] = {}
        self._waiting, self._classes = deque[Any](), deque[Any]()
        self._add(roots, 0)
        self._run()
        self.near = list(self.found.values())
        while self._classes:
            self._waiting, self._classes = self._classes, deque()
            self._run()

    def handlers(self, instance: Any) -> tuple[StateHandler, ...]:
        """Return the handlers of an object, cached by class."""
        cls = type(instance)
        if id(cls) not in self._known:  # by id: metaclasses may override hashing
            self._known[id(cls)] = cls, handlers_of(cls)
        return self._known[id(cls)][1]

    def before(self, instance: Any) -> Any:
        """Return the object from which the walk reached `instance`; None for a root."""
        return self.found.get(self._before.get(id(instance), 0))

    def name(self, instance: Any) -> str:
        """Return an expression for the object (`trainer.log['loss']`), or its class: `a dict`."""
        words: list[str] = []
        part = instance
        while len(words) < 24 and (holder := self.before(part)) is not None:
            words.append(self._word(holder, part))
            if isinstance(holder, names.Names | CellType):
                break
            part = holder
        return "".join(reversed(words)).lstrip(".") or f"a {type(instance).__name__}"

    def _word(self, holder: Any, part: Any) -> str:
        """Return the code that gets `part` from `holder`: `net`, `.net`, `[0]`; '' if unknown."""
        pairs: Iterable[tuple[Any, Any]] = ()
        form = "{}"
        if isinstance(holder, names.Names):
            pairs = [(name, holder.space.get(name)) for name in holder.all]
        elif isinstance(holder, CellType):
            part, function = holder, self.before(holder)
            if isinstance(function, FunctionType):
                pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        elif isinstance(holder, ModuleType):
            pairs, form = vars(holder).items(), ".{}"
        elif isinstance(holder, dict):
            is_own = attribute_dict(self.before(holder)) is holder
            pairs, form = dict.items(holder), ".{}" if is_own else "[{!r:.40}]"
        elif isinstance(holder, list | tuple):
            pairs, form = enumerate(holder), "[{}]"
        return next((form.format(key) for key, value in pairs if value is part), "")

    def _run(self) -> None:
        while self._waiting:
            instance = self._waiting.popleft()
            if len(self.found) > MOST_OBJECTS:
                self.cut.append(instance)
            elif self._looked_into(instance) and ownership.is_the_users_class(type(instance)):
                self._add([type(instance)], id(instance), self._classes)

    def _looked_into(self, holder: Any) -> bool:
        """Add `holder`'s parts. If it owns a thread, return False, and keep only its models."""
        for handler in self.handlers(holder):
            try:
                children = list(handler.children(holder))
            except Exception:  # the class's own attribute access fails
                self.elsewhere.append(f"{self.name(holder)} ({type(holder).__name__})")
                continue
            attributes = children[0] if type(handler) is containers.Attributes and children else {}
            if ownership.works_elsewhere(attributes):
                self.elsewhere.append(f"{self.name(holder)} ({type(holder).__name__})")
                del self.found[id(holder)]
                kinds = (torch.nn.Module, torch.optim.Optimizer)
                self._add([p for p in attributes.values() if issubclass(type(p), kinds)], 0)
                return False
            classes = {type(child): child for child in children}  # one child of each class
            changing = {cls for cls, child in classes.items() if self.handlers(child)}
            children = [child for child in children if type(child) in changing]
            for child in children:
                if is_a(child, Iterator):
                    self.holders.setdefault(id(child), []).append((holder, handler))
            self._add(children, id(holder))
        return True

    def _add(self, objects: Iterable[Any], before: int, waiting: deque[Any] | None = None) -> None:
        for instance in objects:
            if id(instance) in self.found or not self.handlers(instance):
                continue
            self.found[id(instance)] = instance
            self._before[id(instance)] = before
            is_whole = type(instance) is names.Names and instance.whole
            queue = self._classes if is_whole else waiting
            (self._waiting if queue is None else queue).append(instance)
