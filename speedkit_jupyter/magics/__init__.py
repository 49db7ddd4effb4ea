"""%speedkit and %%speedbench: parse, call, display."""

from __future__ import annotations

import sys
from typing import Any


def register(shell: Any, open_panel: Any = None) -> None:
    """Add the magics and their completion to an IPython shell.

    `open_panel(model, **more)` is what `%speedkit panel` shows.
    """
    from speedkit_jupyter.magics.completion import add_completion
    from speedkit_jupyter.magics.shell import SpeedKitMagics

    magics = SpeedKitMagics(shell)
    magics.open_panel = open_panel
    shell.register_magics(magics)
    add_completion(shell)


def unregister(shell: Any) -> None:
    """Restore everything and take the magics away."""
    from speedkit_jupyter.magics.completion import remove_completion

    if "speedkit_jupyter.plans.context" in sys.modules:  # else nothing can have been applied
        from speedkit_jupyter.plans.context import restore_all

        restore_all()
    if "speedkit_jupyter.session" in sys.modules:
        from speedkit_jupyter import session

        session.end()
    shell.magics_manager.magics["line"].pop("speedkit", None)
    shell.magics_manager.magics["cell"].pop("speedbench", None)
    shell.magics_manager.registry.pop("SpeedKitMagics", None)
    remove_completion(shell)
