"""Run a script with `auto` on: `python -m speedkit_jupyter run train.py …`."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from speedkit_jupyter.extras.auto.auto import auto
from speedkit_jupyter.support import tracebacks

USAGE = "usage: python -m speedkit_jupyter run [-m MODULE | SCRIPT.py] [ARGUMENT …]"


def main() -> int:
    """Run the program that sys.argv names; return 0, 1 after an exception, 2 after bad usage."""
    is_module = sys.argv[2:3] == ["-m"]
    if sys.argv[1:2] != ["run"] or len(sys.argv) < 3 + is_module:
        print(USAGE, file=sys.stderr)
        return 2
    if not is_module and not os.path.exists(sys.argv[2]):
        print(f"{sys.argv[2]}: there is no such file", file=sys.stderr)
        return 2
    try:
        run(sys.argv[2:])
    except Exception as error:
        error.__traceback__ = tracebacks.users_part(error) or error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


@tracebacks.hide_internal_frames
@tracebacks.user_code_boundary
def run(words: Sequence[str]) -> None:
    """Run a script or a module as `python` would, with `auto` on.

    `words` has the script's path (or `-m` and a module), followed by the program's arguments.
    """
    is_module = words[0] == "-m"
    before, path, sys.argv = sys.argv, [*sys.path], [*words[is_module:]]
    folder = os.getcwd() if is_module else os.path.dirname(os.path.realpath(words[0]))
    sys.path.insert(0, folder)
    try:
        with auto(say=lambda line: print(line, file=sys.stderr)):
            if is_module:
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(os.path.abspath(words[0]), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before, path


if __name__ == "__main__":
    sys.exit(main())
