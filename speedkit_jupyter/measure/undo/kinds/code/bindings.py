"""What all names of a namespace mean: code may bind them in ways that it does not spell.

`exec`, `globals()[...]`, `from math import *`, `setattr` on a module.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from types import ModuleType
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import MISSING
from speedkit_jupyter.measure.undo.kinds.code.names import namespaces
from speedkit_jupyter.measure.undo.kinds.code.spelled import Words
from speedkit_jupyter.measure.undo.kinds.origin import is_the_users_module

# Code that spells none of these binds the globals of its functions by name only, and then all
# other names are left to other threads.
WAYS = frozenset(
    [
        "exec", "eval", "globals", "locals", "vars", "setattr", "delattr", "__setattr__",
        "__delattr__", "__dict__", "__globals__", "f_globals", "modules", "import_module",
        "__import__", "get_ipython", "user_ns", "user_global_ns", "run_path", "run_module",
    ]
)  # fmt: skip


class Bindings:
    """Every name of some namespaces at one moment: `cell`'s, and those of the user's modules.

    And the globals of the functions among `found`, where their code could bind any.
    """

    def __init__(
        self, objects: Collection[Any], words: Words, cell: MutableMapping[str, Any] | None
    ) -> None:
        modules = [module for module in objects if issubclass(type(module), ModuleType)]
        modules += words.namespaces()
        spaces: list[MutableMapping[str, Any]]
        spaces = [vars(module) for module in modules if is_the_users_module(module)]
        spaces += namespaces(objects) if words.named & WAYS else []
        spaces += [] if cell is None else [cell]
        self._saved = [
            (space, dict(space)) for space in {id(space): space for space in spaces}.values()
        ]

    def restore(self) -> None:
        """Each name means what it meant, and new ones are gone."""
        for space, saved in self._saved:
            for name in list(space.keys() - saved.keys()):
                if not _is_part_of(space, name) and not _is_the_compilers(name):
                    space.pop(name, None)
            for name, value in saved.items():
                if space.get(name, MISSING) is not value and not _is_the_compilers(name):
                    space[name] = value


def _is_the_compilers(name: str) -> bool:
    """Whether torch.compile binds it (`__resume_at_6_2`), which deletes it with its code.

    Compiled code looks such names up each time it runs, the user's own compiled functions too.
    """
    return name.startswith("__") and not name.endswith("__")


def _is_part_of(space: MutableMapping[str, Any], name: str) -> bool:
    """A package's own module, which Python would not bind a second time."""
    value = space.get(name)
    whole = f"{space.get('__name__')}.{name}"
    return isinstance(value, ModuleType) and value.__name__ == whole
