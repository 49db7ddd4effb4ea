"""A walk over all objects that code can reach, nearest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch

from speedkit_jupyter.state.handlers.base import StateHandler, attribute_dict
from speedkit_jupyter.state.handlers.containers import Attributes
from speedkit_jupyter.state.handlers.names import Names
from speedkit_jupyter.state.handlers.registry import PROXIES, handlers_of
from speedkit_jupyter.state.ownership import is_the_users_class, works_elsewhere
from speedkit_jupyter.support.lookup import is_a

# No more objects are looked into. Containers of more elements than LARGE come last, so that they
# hide nothing.
MOST_OBJECTS, LARGE = 100_000, 2_000
SIZED: tuple[Any, ...] = (list, dict, tuple, set, deque)


class Walk:
    """All objects behind `roots` that are no plain values, by identity.

    `near` are reached without passing through a class, whose methods name much that no step calls,
    or a whole namespace.
    `cut` are not looked into; `holders` says what holds each iterator; `elsewhere` are names of
    objects with a thread or process of their own.
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
        self._add(roots, 0)
        self._run()
        self.near = list(self.found.values())
        while self._classes:
            self._waiting, self._classes = self._classes, deque()
            self._run()

    def handlers(self, instance: Any) -> tuple[StateHandler, ...]:
        """Return the handlers of one object."""
        cls = type(instance)
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
            if holder is None:
                break
            words.append(self._word(holder, part))
            if isinstance(holder, Names | CellType):
                break
            part = holder
        return "".join(reversed(words)).lstrip(".") or f"a {type(instance).__name__}"

    def _word(self, holder: Any, part: Any) -> str:
        """Return the step from one object to the next, as it is written in Python."""
        pairs: Iterable[tuple[Any, Any]] = ()
        form = "{}"
        if isinstance(holder, Names):
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
        while self._waiting or self._large:
            instance = (self._waiting or self._large).popleft()
            if len(self.found) > MOST_OBJECTS:
                self.cut.append(instance)
            elif self._looked_into(instance) and is_the_users_class(cls := type(instance)):
                self._add([cls], id(instance), self._classes)

    def _looked_into(self, holder: Any) -> bool:
        """Add the objects that an object holds; return False if it is not to be looked into."""
        for handler in self.handlers(holder):
            try:
                children = list(handler.children(holder))
            except Exception:  # an object of a class with tricks of its own
                self.elsewhere.append(f"{self.name(holder)} ({type(holder).__name__})")
                continue
            if type(handler) is Attributes and children and works_elsewhere(children[0]):
                self.elsewhere.append(f"{self.name(holder)} ({type(holder).__name__})")
                del self.found[id(holder)]
                self._add(_models_in(children[0]), 0)
                return False
            kinds = {type(child): child for child in children}  # of a long list, each once
            changing = {cls for cls, child in kinds.items() if self.handlers(child)}
            children = [child for child in children if type(child) in changing]
            for child in children:
                if is_a(child, Iterator) and type(child) not in PROXIES:
                    self.holders.setdefault(id(child), []).append((holder, handler))
            self._add(children, id(holder))
        return True

    def _add(self, objects: Iterable[Any], before: int, waiting: deque[Any] | None = None) -> None:
        for instance in objects:
            if id(instance) not in self.found and self.handlers(instance):
                self.found[id(instance)] = instance
                self._before[id(instance)] = before
                queue = self._large if _length(instance) > LARGE else self._waiting
                is_far = type(instance) is Names and instance.whole
                (self._classes if is_far else queue if waiting is None else waiting).append(
                    instance
                )


def _models_in(attributes: dict[str, Any]) -> list[Any]:
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    return [value for value in list(attributes.values()) if issubclass(type(value), kinds)]


def _length(instance: Any) -> int:
    base = next((base for base in SIZED if issubclass(type(instance), base)), None)
    return 0 if base is None else int(base.__len__(instance))
