"""Extras of the magics, found by name: the core imports none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from speedkit_jupyter.notebook.options import Command, Option
from speedkit_jupyter.support.extras import provided


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
    """Subcommands of `%speedkit`, functions that run its cells, and modes of `%%speedbench`.

    `begin` is called with the shell once the extension and torch are loaded; it registers the
    function that ends its work with `at_unload`.
    """

    commands: Sequence[Command] = ()
    cells: Mapping[str, Callable[..., None]] = field(default_factory=dict)
    modes: Sequence[Mode] = ()
    begin: Callable[[Any], None] | None = None


@cache
def plugins() -> tuple[Plugin, ...]:
    """Return each `PLUGIN` of the extras of this package, and of other packages."""
    return tuple(provided("PLUGIN"))


def modes() -> list[Mode]:
    """Return the modes that extras add to `%%speedbench`."""
    return [mode for plugin in plugins() for mode in plugin.modes]
