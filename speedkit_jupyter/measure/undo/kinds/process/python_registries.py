"""What Python's own modules keep for all: types of files, what is called when an object goes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from speedkit_jupyter.measure.undo.kinds.origin import is_installed
from speedkit_jupyter.measure.undo.kinds.settings import Setting, owner_of, refill

WORDS = "mimetypes add_type"


def settings() -> Iterator[Setting]:
    """Both."""
    yield Setting("mimetypes", _types, _write_types, WORDS)
    yield Setting("finalizers", _Finalizers, _write_finalizers)


def _tables() -> list[dict[str, Any]]:
    """Those of the database that all ask, each by strict and by common types."""
    types = owner_of("mimetypes")._db
    pairs = (types.types_map, types.types_map_inv)
    return [*pairs[0], *pairs[1], types.encodings_map, types.suffix_map]


def _types() -> list[dict[str, Any]] | None:
    """None before anything was asked: it reads files then."""
    if owner_of("mimetypes")._db is None:
        return None
    return [
        {name: [*value] if isinstance(value, list) else value for name, value in table.items()}
        for table in _tables()
    ]


def _write_types(value: list[dict[str, Any]] | None) -> None:
    module = owner_of("mimetypes")
    if value is None:
        module._db, module.inited = None, False
        module._default_mime_types()
        return
    for table, saved in zip(_tables(), value, strict=True):
        copies = {
            n: [*registered] if isinstance(registered, list) else registered
            for n, registered in saved.items()
        }
        refill(table, list(copies.items()))


class _Finalizers:
    """`weakref.finalize`, of the user's: the same as of before where there are no new ones.

    Libraries make many, and one whose object has gone is called and goes too.
    """

    def __init__(self) -> None:
        self.known = {finalizer for finalizer in list(_registry()) if _is_the_users(finalizer)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Finalizers) and self.known <= other.known

    __hash__ = None  # type: ignore[assignment]


def _write_finalizers(value: _Finalizers) -> None:
    for finalizer in _Finalizers().known - value.known:
        finalizer.detach()


def _registry() -> Any:
    return weakref.finalize._registry  # type: ignore[attr-defined]


def _is_the_users(finalizer: Any) -> bool:
    """Alive, and what it calls is no library's."""
    info = _registry().get(finalizer)
    home = getattr(getattr(info, "func", None), "__module__", None)
    if info is None:
        return False
    is_pythons_own = not isinstance(home, str) or home == "builtins"
    return is_pythons_own or not is_installed(str(home).partition(".")[0])
