"""Plug-ins of extras: subcommands, `%%speedkit` cells and modes of `%%speedbench`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from speedkit_jupyter.notebook.options import Command, Option
from speedkit_jupyter.support.extras import provided


@dataclass(frozen=True)
class Mode:
    """An option that replaces the timing of `%%speedbench` with another kind of measurement.

    `begin(shell, session, cell, arguments, command)` returns an `Engine` (`rounds.comparison`) and
    a title for the progress display. `run`, used instead if set, takes the same arguments, does all
    the work and returns the magic's result. `also` lists options of other modes to accept.
    """

    option: Option
    begin: Callable[..., tuple[Any, str]] | None = None
    run: Callable[..., Any] | None = None
    also: Sequence[str] = ()
    about: Mapping[str, str] = field(default_factory=dict)  # the purpose of each usage, for help

    @property
    def name(self) -> str:
        """Return the option with its dashes, such as `--profile`."""
        return self.option.names[0]

    def is_asked(self, arguments: Any) -> bool:
        """Return whether the line has the option."""
        return getattr(arguments, self.name.lstrip("-")) not in (None, False)


@dataclass(frozen=True)
class Plugin:
    """An extra's subcommands, functions that run `%%speedkit` cells, and `%%speedbench` modes.

    `begin(shell)` is called once, after the first cell that ends with torch imported. It registers
    its clean-up function with `at_unload`.
    """

    commands: Sequence[Command] = ()
    cells: Mapping[str, Callable[..., None]] = field(default_factory=dict)
    modes: Sequence[Mode] = ()
    begin: Callable[[Any], None] | None = None


@cache
def plugins() -> tuple[Plugin, ...]:
    """Return the `PLUGIN` objects of all extras, in this package and in others."""
    return tuple(provided("PLUGIN"))


def modes() -> list[Mode]:
    """Return the modes that extras add to `%%speedbench`."""
    return [mode for plugin in plugins() for mode in plugin.modes]
