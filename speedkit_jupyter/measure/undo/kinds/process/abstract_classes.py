"""Which classes were registered with abstract ones: `Sequence.register(Plain)`."""

from __future__ import annotations

import abc
import collections.abc
import importlib
import numbers
from collections.abc import Collection, Iterator
from typing import Any

from speedkit_jupyter.measure.undo.kinds.code.spelled import Words
from speedkit_jupyter.measure.undo.kinds.settings import CHANGED


class Registrations:
    """Of abstract classes that the step reaches and Python's own, where its code registers any."""

    def __init__(self, objects: Collection[Any], spaces: Collection[Any], words: Words) -> None:
        usual = [*vars(collections.abc).values(), *vars(numbers).values()]
        classes = [*objects, *spaces, *usual] if "register" in words.named else []
        self._classes = list({id(cls): cls for cls in classes if _is_abstract(cls)}.values())
        self._saved = [_registered(cls) for cls in self._classes]

    def restore(self) -> Iterator[tuple[str, str]]:
        """Register anew those that were; what Python has remembered meanwhile is forgotten."""
        for cls, saved in zip(self._classes, self._saved, strict=True):
            if _registered(cls) != saved:
                _reset(cls, "_reset_registry")
                for reference in saved:
                    if (registered := reference()) is not None:
                        abc.ABCMeta.register(cls, registered)
                for member in self._classes:
                    _reset(member, "_reset_caches")
                if _registered(cls) != saved:
                    yield f"{cls.__name__}.register", CHANGED


def _is_abstract(instance: Any) -> bool:
    return issubclass(type(instance), abc.ABCMeta)


def _registered(cls: Any) -> set[Any]:
    """Weak references, in Python's own books."""
    return set(importlib.import_module("_abc")._get_dump(cls)[0])


def _reset(cls: Any, name: str) -> None:
    getattr(importlib.import_module("_abc"), name)(cls)
