"""`auto()` in a program, and for a whole script."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from speedkit_jupyter.extras.auto.session import OVERHEAD, Auto
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.exceptions import ArgumentError
from speedkit_jupyter.support.tracebacks import hide_internal_frames


@contextmanager
def auto(
    *,
    overhead: float = OVERHEAD,
    evaluation: str = "plan",
    say: Callable[[str], None] | None = None,
) -> Iterator[Auto]:
    """Race plans on the loops of the block, and keep the fastest for the rest of each loop.

    Models and optimizers are found by the calls and steps that the block makes. At the end of the
    block every flag and object is as it was; what was trained stays.

    Args:
        overhead: The share of the run that examinations and slower plans may cost at any moment,
            from 0 to 1 (default 0.02).
        evaluation: Whether calls without gradients run under the winner (`"plan"`), or as they are
            written (`"exact"`).
        say: Takes each line for the user; the default is the logger `speedkit_jupyter`.

    Yields:
        The races, as `Auto`.

    Raises:
        ArgumentError: `overhead` is no share, or `evaluation` another word.

    Example::

        with speedkit_jupyter.auto():
            for x, y in loader:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
    """
    running = made(overhead, evaluation, say or messages.note)
    running.begin()
    try:
        running.begin_cell()
        yield running
    finally:
        for line in running.end_cell():
            (say or messages.note)(line)
        running.end()


def made(overhead: float, evaluation: str, say: Callable[[str], None]) -> Auto:
    """Return races that have not begun. Raises ArgumentError."""
    if not isinstance(overhead, int | float) or not 0 <= overhead <= 1:
        raise ArgumentError(f"overhead is a share from 0 to 1, as 0.02, not {overhead!r:.40}")
    if evaluation not in ("plan", "exact"):
        raise ArgumentError(f'evaluation is "plan" or "exact", not {evaluation!r:.40}')
    return Auto(float(overhead), evaluation == "exact", say)


@hide_internal_frames
def run(arguments: Sequence[str]) -> None:
    """Run a script as `python script.py …` would, with `auto` on."""
    script, *rest = arguments
    before, sys.argv = sys.argv, [script, *rest]
    path = [*sys.path]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        with auto(say=lambda line: print(line, file=sys.stderr)):
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before, path
