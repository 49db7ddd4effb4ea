"""Check a rewrite: `python -m speedkit_jupyter.check candidate.py:f reference.py:g`."""

from __future__ import annotations

import argparse
import os
import sys

from speedkit_jupyter.extras.check.api import SIZES, check
from speedkit_jupyter.support.exceptions import in_a_line

if __name__ != "__main__":
    raise ImportError("`from speedkit_jupyter import check` is the function; run this file with -m")


def main() -> int:
    """Print a report; return 0 if the rewrite is right, 1 if wrong, 2 on errors, 3 if unchecked."""
    parser = argparse.ArgumentParser(prog="python -m speedkit_jupyter.check", description=__doc__)
    parser.add_argument("candidate", help="the rewrite: FILE.py:NAME, a function or a module")
    parser.add_argument("reference", help="the function that it replaces: FILE.py:NAME")
    parser.add_argument("--inputs", help="FILE.py:NAME (default: inputs of the reference's file)")
    parser.add_argument("--sizes", help=f"of {','.join(SIZES)} (default: all)")
    parser.add_argument("--budget", type=float, help="seconds in all (default 30)")
    parser.add_argument("--no-gradients", action="store_true", help="the forward pass alone")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    inputs = given.inputs or f"{given.reference.rpartition(':')[0]}:inputs"
    options = {"sizes": given.sizes, "gradients": not given.no_gradients, "budget_s": given.budget}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the loaded files goes to stderr
    try:
        found = check(given.candidate, given.reference, inputs, **options)
    except Exception as error:  # including errors in the user's files
        print(in_a_line(error), file=sys.stderr)
        return 2
    print(found.to_json() if given.json else found, file=answers, flush=True)
    return {"right": 0, "wrong": 1}.get(found.verdict, 3)


sys.exit(main())
