"""Programs in processes that know nothing but torch: forked from one that has only imported it.

This module must import nothing that a fresh process would not have.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

LIMIT_S = 300.0


def run(
    program: Path, *arguments: str, preload: Sequence[str] = ("torch",)
) -> tuple[int | None, str]:
    """Run a file as a script in its own folder; its exit code and what it printed.

    The process is forked from one that has imported `preload`, the first caller's.
    """
    log = program.with_suffix(".log")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    process = context.Process(
        target=execute, args=(str(program), arguments, str(log), dict(os.environ))
    )
    process.start()
    process.join(LIMIT_S)
    if process.is_alive():
        process.kill()
    return process.exitcode, log.read_text(errors="replace")


def execute(
    program: str, arguments: tuple[str, ...], log: str, environment: Mapping[str, str]
) -> None:
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(os.path.dirname(program))
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
