"""A walk over all objects that code can reach, nearest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any

from speedkit_jupyter.measure.undo.handlers.base import StateHandler, attribute_dict
from speedkit_jupyter.measure.undo.handlers.containers import Attributes
from speedkit_jupyter.measure.undo.handlers.names import Names
from speedkit_jupyter.measure.undo.handlers.registry import PROXIES, handlers_of
from speedkit_jupyter.measure.undo.ownership import is_the_users_class, works_elsewhere
from speedkit_jupyter.support.lookup import is_a

# No more objects are looked into. Containers of more elements than LARGE come last, so that they
# hide nothing.
MOST_OBJECTS, LARGE = 100_000, 2_000
SIZED: tuple[Any, ...] = (list, dict, tuple, set, deque)


class Walk:
    """All objects behind `roots` that are no plain values, by identity.

    `near` are those that are reached without passing through a class: its methods name much that
    no step calls. `cut` are objects that were not looked into; `holders` says what holds each
    iterator; `elsewhere` are names of objects with a thread or process of their own.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.found: dict[int, Any] = {}
        self.near: list[Any] = []
        self.cut: list[Any] = []
        self.elsewhere: list[str] = []
        self.holders: dict[int, list[tuple[Any, StateHandler]]] = {}
        self._known: dict[type, tuple[StateHandler, ...]] = {}
        self._before: dict[int, int] = {}
        self._waiting, self._large, self._classes = deque[Any](), deque[Any](), deque[Any]()
        self._add(list(roots), 0, self._waiting)
        self._run()
        self.near = list(self.found.values())
        while self._classes:
            self._waiting, self._classes = self._classes, deque()
            self._run()

    def handlers(self, instance: Any) -> tuple[StateHandler, ...]:
        """Return the handlers of one object."""
        return self._handlers(type(instance))

    def _handlers(self, cls: type) -> tuple[StateHandler, ...]:
        try:
            if cls not in self._known:
                self._known[cls] = handlers_of(cls)
            return self._known[cls]
        except Exception:  # its metaclass compares or hashes in a way of its own
            return handlers_of(cls)

    def before(self, instance: Any) -> Any:
        """Return the object through which it was reached; None for a root."""
        return self.found.get(self._before.get(id(instance), 0))

    def name(self, instance: Any) -> str:
        """Return how code gets to it: `trainer.log['loss']`."""
        words: list[str] = []
        part = instance
        for _ in range(24):
            holder = self.before(part)
            if holder is None and part is instance:  # a root, which has a name all the same
                holder = self._holder(part)
            if holder is None:
                break
            words.append(self._word(holder, part))
            if isinstance(holder, Names | CellType):
                break
            part = holder
        return "".join(reversed(words)).lstrip(".") or f"a {type(instance).__name__}"

    def _holder(self, part: Any) -> Any:
        """Return the first container or variable that holds it."""
        kinds = (dict, list, tuple, Names, CellType)
        holders = (holder for holder in self.found.values() if issubclass(type(holder), kinds))
        for holder in holders:
            if any(child is part for h in self.handlers(holder) for child in h.children(holder)):
                return holder
        return None

    def _word(self, holder: Any, part: Any) -> str:
        """Return the step from one object to the next, as it is written in Python."""
        if isinstance(holder, Names):
            return next((n for n in holder.all if holder.space.get(n) is part), "")
        if isinstance(holder, CellType):
            function = self.before(holder)
            cells = function.__closure__ or () if isinstance(function, FunctionType) else ()
            names = [i for i, cell in enumerate(cells) if cell is holder]
            return str(function.__code__.co_freevars[names[0]]) if names else ""
        if isinstance(holder, ModuleType):
            return next((f".{name}" for name, v in vars(holder).items() if v is part), "")
        if isinstance(holder, dict):
            key = next((k for k, v in dict.items(holder) if v is part), "")
            is_own = attribute_dict(self.before(holder)) is holder
            return f".{key}" if is_own else f"[{key!r:.40}]"
        if isinstance(holder, list | tuple):
            return f"[{next((i for i, v in enumerate(holder) if v is part), 0)}]"
        return ""

    def _run(self) -> None:
        while self._waiting or self._large:
            instance = self._waiting.popleft() if self._waiting else None
            if instance is not None and _length(instance) > LARGE:
                self._large.append(instance)
                continue
            instance = self._large.popleft() if instance is None else instance
            if len(self.found) > MOST_OBJECTS:
                self.cut.append(instance)
            else:
                self._look_into(instance)

    def _look_into(self, holder: Any) -> None:
        for handler in self.handlers(holder):
            if not self._look_at(handler, holder):
                return
        if is_the_users_class(cls := type(holder)):
            self._add([cls], id(holder), self._classes)

    def _look_at(self, handler: StateHandler, holder: Any) -> bool:
        """Return False for an object that turns out not to be looked into."""
        try:
            children = list(handler.children(holder))
        except Exception:  # an object of a class with tricks of its own
            self.elsewhere.append(f"{self.name(holder)} ({type(holder).__name__})")
            return True
        if type(handler) is Attributes and children and works_elsewhere(children[0]):
            self.elsewhere.append(f"{self.name(holder)} ({type(holder).__name__})")
            del self.found[id(holder)]
            self._add(_models_in(children[0]), 0, self._waiting)
            return False
        changing = {cls for cls in set(map(type, children)) if self._handlers(cls)}
        children = [child for child in children if type(child) in changing]
        for child in children:
            if is_a(child, Iterator) and type(child) not in PROXIES:
                self.holders.setdefault(id(child), []).append((holder, handler))
        self._add(children, id(holder), self._waiting)
        return True

    def _add(self, objects: list[Any], before: int, waiting: deque[Any]) -> None:
        for instance in objects:
            if id(instance) not in self.found and self.handlers(instance):
                self.found[id(instance)] = instance
                self._before[id(instance)] = before
                waiting.append(instance)


def _models_in(attributes: dict[str, Any]) -> list[Any]:
    """Return the models and optimizers among attributes."""
    import torch

    kinds = (torch.nn.Module, torch.optim.Optimizer)
    return [value for value in list(attributes.values()) if issubclass(type(value), kinds)]


def _length(instance: Any) -> int:
    base = next((base for base in SIZED if issubclass(type(instance), base)), None)
    return 0 if base is None else int(base.__len__(instance))
