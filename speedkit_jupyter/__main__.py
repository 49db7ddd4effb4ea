"""The command line: `python -m speedkit_jupyter run train.py …` runs a script with `auto` on."""

from __future__ import annotations

import sys
from pathlib import Path

from speedkit_jupyter.extras.auto.api import run
from speedkit_jupyter.support.exceptions import SpeedKitError

USAGE = "usage: python -m speedkit_jupyter run SCRIPT.py [ARGUMENT …]"


def main() -> int:
    """Run the script that the command line names; return 2 where it names none."""
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


if __name__ == "__main__":
    sys.exit(main())
