"""The mode `%%speedbench --profile`."""

from __future__ import annotations

from typing import Any

from speedkit_jupyter.extras.profile.profiler import Profiler
from speedkit_jupyter.notebook.cell import Cell, step_of_cell
from speedkit_jupyter.notebook.options import switch
from speedkit_jupyter.notebook.plugins import Mode, Plugin
from speedkit_jupyter.notebook.session import Session


def begin(
    shell: Any, session: Session, cell: Cell, arguments: Any, command: str
) -> tuple[Profiler, str]:
    return Profiler(step_of_cell(shell, cell, arguments), arguments.budget, command), "profiling"


OPTION = switch("--profile", "where the time goes: data, forward, backward, optimizer, lines")
ABOUT = {"%%speedbench --profile": "where the time of a cell goes"}
PLUGIN = Plugin(modes=[Mode(OPTION, begin, about=ABOUT)])
