"""The command line: `python -m speedkit_jupyter run train.py …` runs a script with `auto` on."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from speedkit_jupyter.extras.auto.auto import auto
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.tracebacks import hide_internal_frames

USAGE = "usage: python -m speedkit_jupyter run SCRIPT.py [ARGUMENT …]"


def main() -> int:
    """Run the command line's script; return 2 after a usage error or a SpeedKit error, else 0."""
    if sys.argv[1:2] != ["run"] or len(sys.argv) < 3:
        print(USAGE, file=sys.stderr)
        return 2
    if not Path(sys.argv[2]).is_file():
        print(f"{sys.argv[2]}: there is no such file", file=sys.stderr)
        return 2
    try:
        run(sys.argv[2:])
    except SpeedKitError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


@hide_internal_frames
def run(words: Sequence[str]) -> None:
    """Run a script as `python script.py …` would, with `auto` on.

    `words` are the path of the script and the script's own arguments.
    """
    before, path, sys.argv = sys.argv, [*sys.path], [*words]
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    try:
        with auto(say=lambda line: print(line, file=sys.stderr)):
            runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before, path


if __name__ == "__main__":
    sys.exit(main())
