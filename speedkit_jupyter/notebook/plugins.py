"""Extras of the magics, found by name: the core imports none of them."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from speedkit_jupyter.notebook.options import Command, Option

EXTRAS = f"{__package__.partition('.')[0]}.extras"


@dataclass(frozen=True)
class Mode:
    """Work that an option of `%%speedbench` asks for, in the place of timing or comparing.

    `begin(shell, session, cell, arguments, command)` returns an engine and the title of its
    progress; `run`, in its place, takes the same arguments, does all of the work and returns the
    magic's result. `also` names the options of other modes that this one takes too.
    """

    option: Option
    begin: Callable[..., tuple[Any, str]] | None = None
    run: Callable[..., Any] | None = None
    also: Sequence[str] = ()
    about: Mapping[str, str] = field(default_factory=dict)  # lines of help, by what is written

    @property
    def name(self) -> str:
        """The option as it is written: `--profile`."""
        return self.option.names[0]

    def is_asked(self, arguments: Any) -> bool:
        """Return whether the line has the option."""
        return getattr(arguments, self.name.lstrip("-")) not in (None, False)


@dataclass(frozen=True)
class Plugin:
    """Subcommands of `%speedkit`, functions that run its cells, and modes of `%%speedbench`."""

    commands: Sequence[Command] = ()
    cells: Mapping[str, Callable[..., None]] = field(default_factory=dict)
    modes: Sequence[Mode] = ()


@cache
def plugins() -> tuple[Plugin, ...]:
    """Return the extras of this package, and the extras that other packages registered.

    An extra is a folder of `extras` with a `plugin.py`, or an entry point of the group
    `speedkit_jupyter.extras`; either has the `PLUGIN`.
    """
    spec = find_spec(EXTRAS)
    folders = pkgutil.iter_modules(spec.submodule_search_locations if spec else ())
    names = [f"{EXTRAS}.{one.name}.plugin" for one in folders]
    own = [import_module(name).PLUGIN for name in names if find_spec(name)]
    return (*own, *(point.load() for point in entry_points(group=EXTRAS)))


def modes() -> list[Mode]:
    """Return the modes that extras add to `%%speedbench`."""
    return [mode for plugin in plugins() for mode in plugin.modes]
