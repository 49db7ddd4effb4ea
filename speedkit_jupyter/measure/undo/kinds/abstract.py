"""Which classes were registered with abstract ones: `Sequence.register(Plain)`."""

from __future__ import annotations

import abc
import collections.abc
import importlib
import numbers
from collections.abc import Collection, Iterator
from typing import Any

from speedkit_jupyter.measure.undo.kinds.settings import CHANGED
from speedkit_jupyter.measure.undo.kinds.words import Words


class Registrations:
    """Of abstract classes that the step reaches and Python's own, where its code registers any."""

    def __init__(self, found: Collection[Any], spaces: Collection[Any], words: Words) -> None:
        usual = [*vars(collections.abc).values(), *vars(numbers).values()]
        classes = [*found, *spaces, *usual] if "register" in words.named else []
        self._classes = list({id(one): one for one in classes if _is_abstract(one)}.values())
        self._saved = [_registered(one) for one in self._classes]

    def restore(self) -> Iterator[tuple[str, str]]:
        """Register anew those that were; what Python has remembered meanwhile is forgotten."""
        for cls, saved in zip(self._classes, self._saved, strict=True):
            if _registered(cls) != saved:
                _reset(cls, "_reset_registry")
                for one in saved:
                    if (registered := one()) is not None:
                        abc.ABCMeta.register(cls, registered)
                for other in self._classes:
                    _reset(other, "_reset_caches")
                if _registered(cls) != saved:
                    yield f"{cls.__name__}.register", CHANGED


def _is_abstract(found: Any) -> bool:
    return issubclass(type(found), abc.ABCMeta)


def _registered(cls: Any) -> set[Any]:
    """Weak references, in Python's own books."""
    return set(importlib.import_module("_abc")._get_dump(cls)[0])


def _reset(cls: Any, what: str) -> None:
    getattr(importlib.import_module("_abc"), what)(cls)
