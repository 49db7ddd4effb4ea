"""The two magics as IPython sees them; importing this must stay instant."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand


@magics_class
class SpeedKitMagics(Magics):  # type: ignore[misc]
    """`%speedkit` and `%%speedbench`."""

    session: Any = None
    # What shows a panel; given by the package, since magics and widgets know nothing of each other.
    open_panel: Any = None

    @line_magic  # type: ignore[untyped-decorator]
    @no_var_expand  # type: ignore[untyped-decorator]
    def speedkit(self, line: str) -> None:
        """Apply, explain and undo speed-ups for your own PyTorch code. `%speedkit help`"""
        __tracebackhide__ = True
        from speedkit_jupyter.magics.speedkit import run

        run(self.shell, self._session(), line)

    @cell_magic  # type: ignore[untyped-decorator]
    @no_var_expand  # type: ignore[untyped-decorator]
    def speedbench(self, line: str, cell: str) -> Any:
        """Time this cell, or compare plans for it, fairly. `%speedkit help`"""
        __tracebackhide__ = True
        from speedkit_jupyter.magics.speedbench import run

        try:
            return run(self.shell, self._session(), line, cell)
        except SyntaxError as error:  # IPython shows every frame of these: leave only this one
            raise error.with_traceback(None) from None

    def _session(self) -> Any:
        from speedkit_jupyter import session

        if self.session is None:
            shell: Any = self.shell
            self.session = session.begin(shell.user_ns)
            self.session.open_panel = self.open_panel
        return self.session
