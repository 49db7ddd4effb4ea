"""%speedkit and %%speedbench: parse, call, display."""

from __future__ import annotations

from typing import Any


def register(shell: Any) -> None:
    """Add the magics and their completion to an IPython shell."""
    from speedkit_jupyter.magics.completion import complete
    from speedkit_jupyter.magics.shell import SpeedKitMagics

    shell.register_magics(SpeedKitMagics)
    for name in ("%speedkit", "%%speedbench"):
        shell.set_hook("complete_command", complete, str_key=name)


def unregister(shell: Any) -> None:
    """Restore everything and take the magics away."""
    import sys

    if "speedkit_jupyter.context" in sys.modules:  # else nothing can have been applied
        from speedkit_jupyter.context import restore_all

        restore_all()
    shell.magics_manager.magics["line"].pop("speedkit", None)
    shell.magics_manager.magics["cell"].pop("speedbench", None)
    shell.magics_manager.registry.pop("SpeedKitMagics", None)
    for name in ("%speedkit", "%%speedbench"):
        shell.strdispatchers["complete_command"].strs.pop(name, None)
