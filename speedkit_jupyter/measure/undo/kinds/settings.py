"""What belongs to the whole process, as a table: how each is read, and how it is written."""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import reduce
from typing import Any, NamedTuple

from speedkit_jupyter.measure.undo.kinds.base import MISSING, is_the_plans

Read = Callable[[], Any]
Write = Callable[[Any], object]

CHANGED = "was changed by the step, and could not be put back"


class Setting(NamedTuple):
    """How one is read and written; `name` is for people. Without `write` a change is named.

    Where importing a library may change it as well, `words` are those that code has to spell which
    changes it itself: `"simplefilter filterwarnings"`.
    """

    name: str
    read: Read
    write: Write | None
    words: str = ""


def _nothing() -> frozenset[str]:
    return frozenset()


class Settings:
    """The values of settings at one moment; what is not readable here is left alone."""

    def __init__(self, settings: Iterable[Setting]) -> None:
        self._modules = set(sys.modules)
        self._values: list[tuple[Setting, Any]] = []
        for one in settings:
            try:
                self._values.append((one, one.read()))
            except Exception:  # not in this version of torch, or not on this machine
                continue

    def restore(
        self, spelled: Callable[[], Collection[str]] = _nothing
    ) -> Iterator[tuple[str, str]]:
        """Write those that are otherwise; gives what fails, and why.

        `spelled` gives the words of the user's code: where it spells none of a setting's, and
        modules were imported meanwhile, the change is theirs and stays.
        """
        imported = bool(sys.modules.keys() - self._modules)
        for one, value in self._values:
            try:
                if is_same(one.read(), value):
                    continue
                if imported and one.words and frozenset(one.words.split()).isdisjoint(spelled()):
                    continue
                if one.write is not None:
                    one.write(value)
                    if is_same(one.read(), value):
                        continue
                yield one.name, CHANGED
            except Exception as error:
                yield one.name, failure(error)

    def changed(self) -> list[str]:
        """The names of those that are otherwise."""
        return [one.name for one, value in self._values if not is_same(one.read(), value)]


class Known(dict[Any, Any]):
    """Equal where both know a name: what is loaded meanwhile has others."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, dict):
            return NotImplemented
        return all(is_same(self[name], other[name]) for name in self.keys() & other.keys())

    __hash__ = None  # type: ignore[assignment]


def failure(error: Exception) -> str:
    """Why something could not be put back, in a line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"could not be put back ({f'{type(error).__name__}: {first:.100}'.rstrip(': ')})"


def is_same(one: Any, other: Any) -> bool:
    """By value, or by identity what can't be compared or says strange things of itself."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) in {list, tuple}:
        return len(one) == len(other) and all(map(is_same, one, other))
    if type(one) is dict:
        return one.keys() == other.keys() and all(is_same(v, other[k]) for k, v in one.items())
    try:
        return bool(one == other)
    except Exception:  # an object of the user's
        return False


# Ways to read and write. All of them find their module when they are used: a table costs nothing,
# and what is not loaded is not looked at.


def owner_of(path: str) -> Any:
    """`torch.optim.optimizer`, or what stands in a module: `decimal:DefaultContext`.

    Python's own modules are loaded for it: a step may do so itself and change them at once.
    """
    name, _, inside = path.partition(":")
    if name not in sys.modules and name.partition(".")[0] in sys.stdlib_module_names:
        importlib.import_module(name)
    return reduce(getattr, inside.split(".") if inside else (), sys.modules[name])


def attribute(path: str, name: str, words: str = "", title: str = "") -> Setting:
    """An attribute of a module or a class, which need not be there."""

    def write(value: Any) -> None:
        if value is MISSING:
            delattr(owner_of(path), name)
        else:
            setattr(owner_of(path), name, value)

    return Setting(
        title or f"{path.replace(':', '.')}.{name}",
        lambda: getattr(owner_of(path), name, MISSING),
        write,
        words,
    )


def calls(title: str, path: str, read: str, write: str, words: str = "") -> Setting:
    """A pair of functions of a module, be they deep in it: `backends.mha.get_fastpath_enabled`."""
    return Setting(
        title,
        lambda: operator.attrgetter(read)(owner_of(path))(),
        lambda value: operator.attrgetter(write)(owner_of(path))(value),
        words,
    )


def contents(path: str, name: str, words: str = "", title: str = "") -> Setting:
    """A list, dict or set that a module keeps: which one it is, and what it holds.

    What a plan has put in is the plan's, which may have been applied anew since.
    """

    def read() -> _Held:
        found = getattr(owner_of(path), name)
        return _Held(found, [one for one in _items(found) if not _is_of_a_plan(found, one)])

    def write(value: _Held) -> None:
        found, items = value.found, value.items
        refill(found, [*items, *(one for one in _items(found) if _is_of_a_plan(found, one))])
        if getattr(owner_of(path), name) is not found:
            setattr(owner_of(path), name, found)

    return Setting(title or f"{path.replace(':', '.')}.{name}", read, write, words)


class _Held:
    """A container and what it held; equal where both are the same objects."""

    def __init__(self, found: Any, items: list[Any]) -> None:
        self.found, self.items = found, items

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Held) or self.found is not other.found:
            return False
        mine, others = self.items, other.items
        if isinstance(self.found, set):  # whose order is nobody's
            return set(map(id, mine)) == set(map(id, others))
        if isinstance(self.found, dict):
            mine, others = ([part for pair in items for part in pair] for items in (mine, others))
        return len(mine) == len(others) and all(map(operator.is_, mine, others))

    __hash__ = None  # type: ignore[assignment]


def _items(found: Any) -> list[Any]:
    return list(dict.items(found)) if isinstance(found, dict) else list(found)


def _is_of_a_plan(found: Any, item: Any) -> bool:
    return is_the_plans(item[1] if isinstance(found, dict) else item)


def refill(found: Any, items: list[Any]) -> None:
    """Let a container hold these."""
    if isinstance(found, list):
        found[:] = items
        return
    found.clear()
    found.update(items)
