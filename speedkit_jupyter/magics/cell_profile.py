"""%%speedbench --profile: where the time of the cell goes."""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError

from speedkit_jupyter.magics.cell import Cell
from speedkit_jupyter.magics.cell_step import step_of_cell
from speedkit_jupyter.magics.namespace import models
from speedkit_jupyter.measure.rounds.timeit_run import device_of
from speedkit_jupyter.measure.subject.environment import environment
from speedkit_jupyter.profiling.lines import cells
from speedkit_jupyter.profiling.loops import Loops
from speedkit_jupyter.profiling.profile import Profile
from speedkit_jupyter.profiling.profiler import Profiler
from speedkit_jupyter.support.exceptions import StepError


def profiler(
    shell: Any, cell: Cell, arguments: Any, command: str, budget_s: float | None
) -> Profiler:
    """Of a cell whose loops tell what they wait for."""
    loops = Loops()
    step = step_of_cell(shell, cell.rewritten(loops.rewritten), arguments)
    device = device_of(step)
    profile = Profile(names=cells(), environment=environment(device), command=command)
    called = {id(model): name for name, model in models(shell.user_ns).items()}
    return Profiler(step, device, profile, budget_s, loops, called)


def profiler_again(
    shell: Any, cell: Cell, arguments: Any, command: str, budget_s: float | None
) -> Profiler:
    """The same with what the cell's names mean by now; raises StepError."""
    try:
        return profiler(shell, cell, arguments, command, budget_s)
    except UsageError as error:
        raise StepError(str(error)) from None
