"""A walk over all objects that code can reach, nearest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from time import sleep
from types import CellType, FunctionType
from typing import Any

from speedkit_jupyter.measure.undo.busy_threads import others_at_work
from speedkit_jupyter.measure.undo.kinds.base import Kind, attribute_dict
from speedkit_jupyter.measure.undo.kinds.code.names import Names
from speedkit_jupyter.measure.undo.kinds.files.mirrors import mirrors_a_file
from speedkit_jupyter.measure.undo.kinds.objects.instances import Attributes
from speedkit_jupyter.measure.undo.kinds.objects.shared import is_elsewhere_too, parts_of_its_own
from speedkit_jupyter.measure.undo.kinds.objects.weak import PROXIES
from speedkit_jupyter.measure.undo.kinds.origin import is_the_users_class
from speedkit_jupyter.measure.undo.kinds.registry import Registry
from speedkit_jupyter.measure.undo.kinds.tensors.histories import Leaves, has_graph
from speedkit_jupyter.measure.undo.kinds.tensors.tensors import Gradients, is_trainable
from speedkit_jupyter.support.lookup import is_a

# More are not looked at. Containers of more elements than LARGE come last, so that they hide
# nothing.
MOST_OBJECTS, LARGE = 100_000, 2_000
SIZED: tuple[Any, ...] = (list, dict, tuple, set, deque)
# So long a look shows which parameters other threads train.
GLANCE_S = 0.02


class Walk:
    """What lies behind `roots`: every object that is no plain value, by identity.

    `near` are those that are reached without passing through a class: its methods name much that
    no step calls. `cut` are objects that were not looked into any more; `holders` says what holds
    an iterator; `graphs` are tensors that autograd has a graph of, at whose `leaves` it looks too;
    `running` are names of what has a thread or a process of its own, `mirrors` of
    what goes with a file that is written to.

    Who reads `.grad` of a tensor that another thread trains may end the process: its backward pass
    writes there without Python's lock. So gradients come last, and of what others are seen to
    write meanwhile they are not looked at, now or later.
    """

    def __init__(self, roots: Iterable[Any], most: int = MOST_OBJECTS) -> None:
        self.registry = Registry()
        self.found: dict[int, Any] = {}
        self.near: list[Any] = []
        self.cut: list[Any] = []
        self.running: list[str] = []
        self.mirrors: list[str] = []
        self.holders: dict[int, list[tuple[Any, Kind]]] = {}
        self.graphs: list[Any] = []
        self.leaves = Leaves()
        self._before: dict[int, int] = {}
        self._parameters: list[tuple[Any, int]] = []
        self._trained: set[int] = set()
        self._most = most
        self._waiting: deque[Any] = deque()
        self._large: deque[Any] = deque()
        self._classes: deque[Any] = deque()
        self._add(list(roots), 0, self._waiting)
        self._run()
        self._look_at_gradients()
        self.near = list(self.found.values())
        while self._classes:
            self._waiting, self._classes = self._classes, deque()
            self._run()
            self._look_at_gradients()
        self.leaves.forget()

    def kinds(self, instance: Any) -> tuple[Kind, ...]:
        """The kinds of one object."""
        kinds = self.registry.of(type(instance))
        if id(instance) in self._trained:
            return tuple(kind for kind in kinds if type(kind) is not Gradients)
        return kinds

    def is_trained_elsewhere(self, instance: Any) -> bool:
        """Whether another thread was seen to write it: nobody else may read its gradient."""
        return id(instance) in self._trained

    def before(self, instance: Any) -> Any:
        """The object through which it was reached; None for a root."""
        return self.found.get(self._before.get(id(instance), 0))

    def name(self, instance: Any) -> str:
        """How the code comes to it, in words like `trainer.log['loss']`."""
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
        """The first container or variable that holds it."""
        kinds = (dict, list, tuple, Names, CellType)
        return next(
            (
                holder
                for holder in self.found.values()
                if issubclass(type(holder), kinds)
                and any(child is part for k in self.kinds(holder) for child in k.children(holder))
            ),
            None,
        )

    def _run(self) -> None:
        while self._waiting or self._large:
            instance = self._waiting.popleft() if self._waiting else None
            if instance is not None and _length(instance) > LARGE:
                self._large.append(instance)
                continue
            instance = self._large.popleft() if instance is None else instance
            if len(self.found) > self._most:
                self.cut.append(instance)
            else:
                self._look_into(instance)

    def _look_at_gradients(self) -> None:
        while self._parameters:
            waiting, self._parameters = self._parameters, []
            if others_at_work():
                sleep(GLANCE_S)
            for parameter, version in waiting:
                if parameter._version == version:
                    self._look_at(Gradients(), parameter)
                else:
                    self._trained.add(id(parameter))
            self._run()

    def _look_into(self, holder: Any) -> None:
        if any(type(kind) is Attributes for kind in self.kinds(holder)) and mirrors_a_file(holder):
            self.mirrors.append(self.name(holder))
            del self.found[id(holder)]
            return
        for kind in self.kinds(holder):
            if type(kind) is Gradients and is_trainable(holder):
                self._parameters.append((holder, holder._version))
            elif not self._look_at(kind, holder):
                return
        if is_the_users_class(cls := type(holder)):
            self._add([cls], id(holder), self._classes)

    def _look_at(self, kind: Kind, holder: Any) -> bool:
        """Of one kind; False where the object turns out not to be looked into."""
        try:
            children = list(kind.children(holder))
        except Exception:  # an object of a class with tricks of its own
            self.running.append(f"{self.name(holder)} ({type(holder).__name__})")
            return True
        changing = {cls for cls in set(map(type, children)) if self.registry.of(cls)}
        if type(kind) is Gradients and has_graph(holder):
            self.graphs.append(holder)
            self._add(list(self.leaves.of(holder)), id(holder), self._waiting)
        if not changing:
            return True
        if type(kind) is Attributes and is_elsewhere_too(holder, children[0]):
            self.running.append(f"{self.name(holder)} ({type(holder).__name__})")
            del self.found[id(holder)]
            self._add(parts_of_its_own(children[0]), 0, self._waiting)
            return False
        children = [child for child in children if type(child) in changing]
        for child in children:
            if is_a(child, Iterator) and type(child) not in PROXIES:
                self.holders.setdefault(id(child), []).append((holder, kind))
        self._add(children, id(holder), self._waiting)
        return True

    def _add(self, objects: list[Any], before: int, waiting: deque[Any]) -> None:
        for instance in objects:
            if id(instance) not in self.found and self.registry.of(type(instance)):
                self.found[id(instance)] = instance
                self._before[id(instance)] = before
                waiting.append(instance)

    def _word(self, holder: Any, part: Any) -> str:
        """The step from one object to the next, as it is written in Python."""
        if isinstance(holder, Names):
            return next((n for n in holder.all if holder.space.get(n) is part), "")
        if isinstance(holder, CellType):
            function = self.before(holder)
            cells = function.__closure__ or () if isinstance(function, FunctionType) else ()
            names = [i for i, cell in enumerate(cells) if cell is holder]
            return str(function.__code__.co_freevars[names[0]]) if names else ""
        if isinstance(holder, dict):
            key = next((k for k, v in dict.items(holder) if v is part), "")
            is_own = attribute_dict(self.before(holder)) is holder
            return f".{key}" if is_own else f"[{key!r:.40}]"
        if isinstance(holder, list | tuple):
            return f"[{next((i for i, v in enumerate(holder) if v is part), 0)}]"
        return ""


def _length(instance: Any) -> int:
    base = next((base for base in SIZED if issubclass(type(instance), base)), None)
    return 0 if base is None else int(base.__len__(instance))
