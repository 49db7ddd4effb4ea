"""%%speedbench --profile: where the time of the cell goes."""

from __future__ import annotations

from typing import Any

from speedkit_jupyter.magics.cell import Cell
from speedkit_jupyter.magics.cell_step import step_of_cell
from speedkit_jupyter.magics.namespace import models
from speedkit_jupyter.measure.rounds.timeit_run import device_of
from speedkit_jupyter.measure.subject.environment import environment
from speedkit_jupyter.profiling.loops import Loops
from speedkit_jupyter.profiling.profile import Profile
from speedkit_jupyter.profiling.profiler import Profiler


def profiler(shell: Any, cell: Cell, arguments: Any, command: str) -> Profiler:
    """Of a cell whose loops tell what they wait for."""
    loops = Loops()
    step = step_of_cell(shell, cell.rewritten(loops.rewritten), arguments)
    device = device_of(step)
    numbers = getattr(shell.compile, "_filename_map", {})
    names = {file: f"cell {number}" for file, number in numbers.items()}
    profile = Profile(names=names, environment=environment(device), command=command)
    called = {id(model): name for name, model in models(shell.user_ns).items()}
    return Profiler(step, device, profile, arguments.budget, loops, called)
