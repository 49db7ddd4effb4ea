"""The faults of torch.compile, shown after each cell; importing this loads no torch."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support import messages
from speedkit_jupyter.torchglue import dynamo

if TYPE_CHECKING:
    from speedkit_jupyter.plans.compile_history import History

COMPILES = re.compile(r"\btorch\.compile\b|(?<!\bre)\.compile\(")


@cache
def history() -> History:
    """Return the one history of this process, as torch has one record of compilations."""
    from speedkit_jupyter.plans.compile_history import History

    return History()


class CompileWatch:
    """Shows the faults of compiling after each cell of a shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._events = {"pre_run_cell": self._before, "post_run_cell": self._after}
        for name, call in self._events.items():
            shell.events.register(name, call)

    def end(self) -> None:
        """Watch no further cell."""
        for name, call in self._events.items():
            with suppress(ValueError):
                self._shell.events.unregister(name, call)
        if dynamo.is_dynamo_loaded():
            history().end()

    def _before(self, info: Any = None) -> None:
        # A cell that is about to compile loads Dynamo anyway.
        if "torch" in sys.modules and COMPILES.search(str(getattr(info, "raw_cell", ""))):
            dynamo.dynamo_config()
        if dynamo.is_dynamo_loaded():
            history().listen()
            history().collect()

    def _after(self, result: Any = None) -> None:
        if not dynamo.is_dynamo_loaded():
            return
        news = history().news()
        if news and messages.verbosity() != "quiet":
            from IPython.display import display

            from speedkit_jupyter.report.compile_report import notice

            display(notice(news))
