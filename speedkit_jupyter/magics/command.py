"""A subcommand of `%speedkit`: parser, completion and help follow from it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from speedkit_jupyter.magics.line import Parser

if TYPE_CHECKING:
    from speedkit_jupyter.session import Session

Names = MutableMapping[str, Any]
Run = Callable[[Names, "Session", argparse.Namespace], None]


def _nothing(parser: Parser) -> None:
    """It takes no arguments."""


@dataclass(frozen=True)
class Command:
    """`summary` is its line in help; `add_arguments` gives the parser what it takes, and `run` does
    it, with the notebook's names, its session, and the arguments. It displays; it returns nothing.
    """

    name: str
    summary: str
    run: Run
    add_arguments: Callable[[Parser], None] = _nothing

    @cached_property
    def parser(self) -> Parser:
        """Made when it is needed: options of the catalog take a while."""
        parser = Parser(f"%speedkit {self.name}")
        self.add_arguments(parser)
        return parser

    @property
    def takes_arguments(self) -> bool:
        """Whether there is anything that it could be given."""
        return bool(self.parser._actions)

    def parse(self, line: str) -> argparse.Namespace:
        """Its arguments; raises UsageError."""
        if line.strip() and not self.takes_arguments:
            raise UsageError(f"%speedkit {self.name} takes no arguments, not {line.strip()!r}")
        return self.parser.parse_line(line)
