"""Imports the compiler while the kernel waits for the next cell, where that will need it.

Dynamo and Inductor take seconds to import. A thread would make a running cell slower, so they are
imported in the kernel's own loop, a part at a time: a cell that comes meanwhile waits for one part.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module

from speedkit_jupyter.support import messages, torch_private
from speedkit_jupyter.support.exceptions import in_a_line

# The cells of "Run all" follow one another sooner.
WAIT_S = 0.5


class IdleImport:
    """Imports once a plan compiles, or one that was learned on this machine does."""

    def __init__(self) -> None:
        self._parts: Iterator[str] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Import from here on, until it is all there or `pause()`; only in a kernel."""
        with suppress(RuntimeError):  # no loop runs in IPython's terminal
            loop = asyncio.get_running_loop()
            if self._parts is None and is_wanted():
                self._parts = iter(torch_private.COMPILER_PARTS)
            if self._parts is not None:
                self._timer = loop.call_later(WAIT_S, self._import_next, loop)

    def pause(self) -> None:
        """Import no further while a cell runs."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _import_next(self, loop: asyncio.AbstractEventLoop) -> None:
        if (name := next(self._parts or iter(()), None)) is None:
            return
        try:
            import_module(name)
        except Exception as error:  # the first compile says why
            messages.debug(f"{name} was not imported ahead: {in_a_line(error)}")
        self._timer = loop.call_later(0, self._import_next, loop)


def is_wanted() -> bool:
    """Return whether code is likely to be compiled in this process, and torch is loaded."""
    if "torch" not in sys.modules:
        return False
    from speedkit_jupyter.machines import compile_cache

    return torch_private.is_dynamo_loaded() or compile_cache.has_bundles()
