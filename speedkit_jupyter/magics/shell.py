"""The two magics as IPython sees them; importing this must stay instant."""

from __future__ import annotations

from collections import ChainMap
from functools import partial
from typing import Any

from IPython.core.magic import (
    Magics,
    cell_magic,
    line_magic,
    magics_class,
    needs_local_scope,
    no_var_expand,
)

from speedkit_jupyter.magics.errors import shown


@magics_class
class SpeedKitMagics(Magics):  # type: ignore[misc]
    """`%speedkit` and `%%speedbench`."""

    session: Any = None
    # What shows a panel; given by the package, since magics and widgets know nothing of each other.
    open_panel: Any = None

    @line_magic  # type: ignore[untyped-decorator]
    @needs_local_scope  # type: ignore[untyped-decorator]
    @no_var_expand  # type: ignore[untyped-decorator]
    def speedkit(self, line: str, local_ns: Any = None) -> None:
        """Apply, explain and undo speed-ups for your own PyTorch code. `%speedkit help`"""
        __tracebackhide__ = True
        from speedkit_jupyter.magics.commands import run

        names = _names(self.shell, local_ns)
        shown(self.shell, "%speedkit", lambda: run(names, self._session(), line))

    @cell_magic  # type: ignore[untyped-decorator]
    @no_var_expand  # type: ignore[untyped-decorator]
    def speedbench(self, line: str, cell: str) -> Any:
        """Time this cell, or compare plans for it, fairly. `%speedkit help`"""
        __tracebackhide__ = True
        from speedkit_jupyter.magics.speedbench import run

        shell = self.shell
        return shown(shell, "%%speedbench", lambda: run(shell, self._session(), line, cell))

    def _session(self) -> Any:
        from speedkit_jupyter import session

        if self.session is None:
            shell: Any = self.shell
            self.session = session.begin(shell.user_ns)
            self.session.open_panel = self.open_panel
        return self.session


def _page(topic: str | None = None) -> str:
    """What `%speedkit?` shows: as help, every option."""
    from speedkit_jupyter.magics.commands import COMMANDS
    from speedkit_jupyter.magics.commands.help import help_page

    return help_page(COMMANDS, topic).to_text()


# IPython asks a magic for this before its docstring; made when it is asked for, since loading the
# extension must stay instant.
vars(SpeedKitMagics.speedkit)["getdoc"] = _page
vars(SpeedKitMagics.speedbench)["getdoc"] = partial(_page, "speedbench")


class _Names(ChainMap[str, Any]):
    """A function's own variables before the notebook's, which are the ones that are written."""

    def __setitem__(self, name: str, value: Any) -> None:
        self.maps[-1][name] = value


def _names(shell: Any, local: Any) -> Any:
    """What words mean where the magic stands: `self` within a method."""
    return (
        shell.user_ns if local is None or local is shell.user_ns else _Names(local, shell.user_ns)
    )
