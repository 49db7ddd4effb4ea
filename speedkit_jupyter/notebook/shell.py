"""Register %speedkit and %%speedbench with IPython. Importing this module must stay fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from traceback import format_exception_only
from typing import Any, TypeVar

from IPython.core import magic
from IPython.core.error import UsageError

from speedkit_jupyter.notebook.completion import add_completion, remove_completion
from speedkit_jupyter.support import AUTO
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.tracebacks import hide_internal_frames, users_part
from speedkit_jupyter.support.weak import at_unload, unload

R = TypeVar("R")
# Commands for help and for ending work; they run even if an environment variable is invalid.
ENDING = ("help", "processes", "restore")
# Functions that end the core's work, each called if its module is loaded. Extras use `at_unload`.
ENDS = {"plans.context": "restore_all", "notebook.session": "end"}


def register(shell: Any) -> None:
    """Register magics, completion and the start of extras; run `auto` if SPEEDKIT_AUTO is 1."""
    shell.register_magics(SpeedKitMagics(shell))
    add_completion(shell)
    begin_extras(shell)
    if os.environ.get(AUTO) == "1":
        shell.run_line_magic("speedkit", "auto")


def unregister(shell: Any) -> None:
    """Undo all plans, end the session and the extras; remove magics and completion."""
    for home, end in ENDS.items():
        if (module := sys.modules.get(f"speedkit_jupyter.{home}")) is not None:
            getattr(module, end)()
    unload()
    for name in ("speedkit", "speedbench"):
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop(name, None)
    shell.magics_manager.registry.pop("SpeedKitMagics", None)
    remove_completion(shell)


def begin_extras(shell: Any) -> None:
    """Register a hook that starts the extras after the first cell that leaves torch imported."""

    def begin(result: Any = None) -> None:
        if "torch" not in sys.modules:
            return
        from speedkit_jupyter.notebook.plugins import plugins

        end()
        for plugin in plugins():
            if plugin.begin is not None:
                plugin.begin(shell)

    def end() -> None:
        with suppress(ValueError):
            shell.events.unregister("post_run_cell", begin)

    shell.events.register("post_run_cell", begin)
    at_unload(end)


@magic.magics_class
class SpeedKitMagics(magic.Magics):  # type: ignore[misc]
    session: Any = None

    @magic.line_cell_magic  # type: ignore[untyped-decorator]
    @magic.no_var_expand  # type: ignore[untyped-decorator]
    def speedkit(self, line: str, cell: str | None = None) -> None:
        """Apply, explain and undo speed-ups for your own PyTorch code. `%speedkit help`"""
        from speedkit_jupyter.notebook.commands import cell_command, selected

        shell: Any = self.shell
        default = "status" if cell is None else "auto"
        command, rest = shown(shell, "%speedkit", lambda: selected(line, default))
        run, parsed = hide_internal_frames(command.run), command.parse_line
        title = f"%speedkit {command.name}"
        if cell is not None:
            title = f"%{title}"
            run = partial(shown(shell, title, lambda: cell_command(command.name)), source=cell)
        shown(shell, title, lambda: run(shell.user_ns, self._session(command.name), parsed(rest)))

    @magic.line_cell_magic  # type: ignore[untyped-decorator]
    @magic.no_var_expand  # type: ignore[untyped-decorator]
    def speedbench(self, line: str, cell: str | None = None) -> Any:
        """Time a cell or statement, or compare plans for it. Help: `%speedkit help speedbench`"""
        from speedkit_jupyter.notebook.commands import HELP
        from speedkit_jupyter.notebook.speedbench import run, with_statement

        shell: Any = self.shell
        if line.strip() in HELP:
            return shell.run_line_magic("speedkit", "help speedbench")
        line, source = with_statement(line) if cell is None else (line, cell)
        return shown(shell, "%%speedbench", lambda: run(shell, self._session(), line, source))

    def _session(self, command: str = "") -> Any:
        """Return this shell's session; check environment variables, except for ENDING commands."""
        from speedkit_jupyter.notebook import session
        from speedkit_jupyter.plans.config import SpeedConfig

        if command not in ENDING:
            SpeedConfig()  # raises ConfigError for invalid environment variables
        if self.session is None:
            shell: Any = self.shell
            self.session = session.begin(shell.user_ns)
        return self.session


def shown(shell: Any, command: str, run: Callable[[], R]) -> R:
    """Return `run()`, or raise its error so that IPython shows no frames of SpeedKit."""
    try:
        return run()
    except SyntaxError as error:  # usually in the cell; IPython would show SpeedKit's frames
        if str(error.filename)[:1] == "<":
            error.filename = "this cell"
        text = "".join(format_exception_only(type(error), error)).rstrip()
        text = text.replace("_IncompleteInputError", "SyntaxError")  # a private class of Python
        raise UsageError(f"{command}:\n{text}") from None
    except (UsageError, SpeedKitError) as error:
        if users_part(error) is None:  # the user's code has not raised the error
            text = str(error)
            raise UsageError(text if text[:1] == "%" else f"{command}: {text}") from None
        _show_users_part(shell, command, error)
        raise
    except KeyboardInterrupt as error:
        if not hasattr(error, "_render_traceback_"):
            text = str(error) or "stopped; everything is as before"
            _show(error, [f"KeyboardInterrupt: {text}"])
        raise
    except BaseException as error:
        _show_users_part(shell, command, error)
        raise


def _show_users_part(shell: Any, command: str, error: BaseException) -> None:
    part = users_part(error)
    if part is not None and not hasattr(error, "_render_traceback_"):
        lines = shell.InteractiveTB.structured_traceback(type(error), error, part, tb_offset=0)
        _show(error, [*lines, f"({command} has put back the step's changes.)"])


def _show(error: BaseException, lines: list[str]) -> None:
    # Store rendered lines, because later rendering would need frames, which keep the model alive.
    vars(error)["_render_traceback_"] = lambda: lines  # the class may refuse setattr()
