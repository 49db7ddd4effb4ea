"""The context manager `auto()`, and `auto` for a whole script."""

from __future__ import annotations

import runpy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from speedkit_jupyter.extras.auto.auto import OVERHEAD, RUNNING, Auto
from speedkit_jupyter.support import arguments, messages
from speedkit_jupyter.support.tracebacks import hide_internal_frames


@contextmanager
def auto(
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    overhead: float = OVERHEAD,
    evaluation: str = "plan",
    say: Callable[[str], None] | None = None,
) -> Iterator[Auto]:
    """Race plans on the loops of the block, and keep the fastest for the rest of each loop.

    Models and optimizers are found as the block calls and steps them. The end of the block restores
    every flag and object, and keeps the trained parameters. Each step trains exactly once.

    Args:
        model: The only model to race plans on; by default each that a loop of the block calls.
        optimizer: The only optimizer whose loops plans race on; by default each.
        overhead: The share of the run that examinations and slower plans may cost, from 0 to 1
            (default 0.02).
        evaluation: The plan for calls without gradients: the winner (`"plan"`, the default) or no
            plan (`"exact"`).
        say: A function that gets each line for the user (default: the logger `speedkit_jupyter`).

    Yields:
        An `Auto`, which holds the races.

    Raises:
        ArgumentError: `model` is no module, `optimizer` no optimizer, `overhead` not between 0 and
            1, or `evaluation` not `"plan"` or `"exact"`.

    Example::

        with speedkit_jupyter.auto():
            for x, y in loader:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
    """
    arguments.model("model must be", model, optional=True)
    arguments.of_kind("optimizer", optimizer, torch.optim.Optimizer)
    if around := [one for one in RUNNING if one.thread == threading.get_ident()]:
        yield around[0]  # which races on these loops already
        return
    running = Auto(overhead, evaluation, say or messages.note)
    running.only = model, optimizer
    running.begin()
    try:
        running.begin_cell()
        yield running
    finally:
        try:
            for line in running.end_cell(in_notebook=False):
                (say or messages.note)(line)
        finally:
            running.end()


@hide_internal_frames
def run(words: Sequence[str]) -> None:
    """Run a script as `python script.py …` would, with `auto` on.

    `words` are the path of the script and the script's own arguments.
    """
    script, *rest = words
    before, sys.argv = sys.argv, [script, *rest]
    path = [*sys.path]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        with auto(say=lambda line: print(line, file=sys.stderr)):
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before, path
