"""What belongs to the whole process, as a table: how each is read, and how it is written."""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import reduce
from typing import Any, NamedTuple

from speedkit_jupyter.machines.flags import allowed
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
        for setting in settings:
            try:
                self._values.append((setting, setting.read()))
            except Exception:  # not in this version of torch, or not on this machine
                continue

    def restore(
        self, spelled: Callable[[], Collection[str]] = _nothing
    ) -> Iterator[tuple[str, str]]:
        """Write those that are otherwise; gives what fails, and why.

        `spelled` gives the words of the user's code: where it spells none of a setting's, and
        modules were imported meanwhile, the change is theirs and stays.
        """
        for setting, value in self._values:
            try:
                if is_same(setting.read(), value):
                    continue
                if setting.words and self._is_of_an_import(setting.words, spelled):
                    continue
                if setting.write is not None:
                    with allowed():
                        setting.write(value)
                    if is_same(setting.read(), value):
                        continue
                yield setting.name, CHANGED
            except Exception as error:
                yield setting.name, failure(error)

    def _is_of_an_import(self, words: str, spelled: Callable[[], Collection[str]]) -> bool:
        imported = not self._modules.issuperset(sys.modules)
        return imported and frozenset(words.split()).isdisjoint(spelled())

    def changed(self) -> list[str]:
        """The names of those that are otherwise."""
        return [
            setting.name for setting, value in self._values if not is_same(setting.read(), value)
        ]


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


def is_same(now: Any, saved: Any) -> bool:
    """By value, or by identity what can't be compared or says strange things of itself."""
    if now is saved:
        return True
    if type(now) is not type(saved):
        return False
    if type(now) in {list, tuple}:
        # The very same objects, mostly: that takes a tenth of asking each.
        return len(now) == len(saved) and (
            all(map(operator.is_, now, saved)) or all(map(is_same, now, saved))
        )
    if type(now) is dict:
        return now.keys() == saved.keys() and all(is_same(v, saved[k]) for k, v in now.items())
    try:
        return bool(now == saved)
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
        container = getattr(owner_of(path), name)
        return _Held(
            container, [item for item in _items(container) if not _is_of_a_plan(container, item)]
        )

    def write(value: _Held) -> None:
        container, items = value.found, value.items
        refill(
            container,
            [*items, *(item for item in _items(container) if _is_of_a_plan(container, item))],
        )
        if getattr(owner_of(path), name) is not container:
            setattr(owner_of(path), name, container)

    return Setting(title or f"{path.replace(':', '.')}.{name}", read, write, words)


class _Held:
    """A container and what it held; equal where both are the same objects."""

    def __init__(self, container: Any, items: list[Any]) -> None:
        self.found, self.items = container, items

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Held) or self.found is not other.found:
            return False
        mine, theirs = self.items, other.items
        if isinstance(self.found, set):  # whose order is nobody's
            return set(map(id, mine)) == set(map(id, theirs))
        if isinstance(self.found, dict):
            mine, theirs = ([part for pair in items for part in pair] for items in (mine, theirs))
        return len(mine) == len(theirs) and all(map(operator.is_, mine, theirs))

    __hash__ = None  # type: ignore[assignment]


def _items(container: Any) -> list[Any]:
    return list(dict.items(container)) if isinstance(container, dict) else list(container)


def _is_of_a_plan(container: Any, item: Any) -> bool:
    return is_the_plans(item[1] if isinstance(container, dict) else item)


def refill(container: Any, items: list[Any]) -> None:
    """Let a container hold these."""
    if isinstance(container, list):
        container[:] = items
        return
    container.clear()
    container.update(items)
