"""%speedkit and %%speedbench: parse, call, display."""

from __future__ import annotations

from typing import Any


def register(shell: Any, open_panel: Any = None) -> None:
    """Add the magics and their completion to an IPython shell.

    `open_panel(model, **more)` is what `%speedkit panel` shows.
    """
    from speedkit_jupyter.magics.completion import complete
    from speedkit_jupyter.magics.shell import SpeedKitMagics

    magics = SpeedKitMagics(shell)
    magics.open_panel = open_panel
    shell.register_magics(magics)
    for name in ("%speedkit", "%%speedbench"):
        shell.set_hook("complete_command", complete, str_key=name)


def unregister(shell: Any) -> None:
    """Restore everything and take the magics away."""
    import sys

    if "speedkit_jupyter.plans.context" in sys.modules:  # else nothing can have been applied
        from speedkit_jupyter.plans.context import restore_all

        restore_all()
    if "speedkit_jupyter.session" in sys.modules:
        from speedkit_jupyter import session

        session.end()
    shell.magics_manager.magics["line"].pop("speedkit", None)
    shell.magics_manager.magics["cell"].pop("speedbench", None)
    shell.magics_manager.registry.pop("SpeedKitMagics", None)
    for name in ("%speedkit", "%%speedbench"):
        shell.strdispatchers["complete_command"].strs.pop(name, None)
