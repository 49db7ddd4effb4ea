"""Budgets against the clock: real steps of many kinds, with and without other work beside.

Each row is a process of its own, so that what is measured for the first time counts, and what torch
imports for it (not so SpeedKit's own modules):
`benchmark`, `tune`, `%%speedbench` with and without variants, with a budget. The promise: it ends
within 1.25 times the budget and one step, the longest that ran, besides what compiling took.

    python tests/benchmarks/budgets.py [--budgets 2 5 15] [--busy 0 2 4] [--only KIND]
        [--engines benchmark tune timing magic compile] [--emulated]

Prints a row for each (asked, took, over the promise by, compiling, longest step; seconds) and exits
1 where the promise is broken. All of it takes about an hour, `--budgets 2 --busy 2` some minutes.
`--emulated` makes the CPU one without bf16 units, where bf16 is very slow.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

from _steps import KINDS, Step, busy

TIMES = 1.25
VARIANTS = "baseline,bf16,channels_last,fused_optimizer,threads:1"


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budgets", type=float, nargs="+", default=[2, 5, 15])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES))
    parser.add_argument("--only", default="", help="kinds of steps whose name holds this")
    parser.add_argument("--emulated", action="store_true")
    options = parser.parse_args()
    emulated = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    if options.emulated and not emulated.items() <= os.environ.items():
        os.environ.update(emulated)
        os.execv(sys.executable, [sys.executable, *sys.argv])  # read when torch is loaded
    print("| step | engine | busy | asked | took | over | compiling | longest step | found |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    rows = broken = 0
    for beside in options.busy:
        with _others(beside):
            for kind in (one for one in KINDS if options.only in one):
                for engine in options.engines:
                    for asked in options.budgets:
                        row = _measured(engine, kind, asked)
                        rows, broken = rows + 1, broken + (row["over"] > 0)
                        print(_row(kind, engine, beside, asked, row), flush=True)
    print(f"\n{broken} of {rows} break the promise")
    return 1 if broken else 0


@contextmanager
def _others(number: int) -> Iterator[None]:
    """So many busy processes beside it."""
    found = [multiprocessing.Process(target=busy, daemon=True) for _ in range(number)]
    for one in found:
        one.start()
    try:
        yield
    finally:
        for one in found:
            one.terminate()
            one.join()


def _measured(engine: str, kind: str, asked: float) -> dict[str, Any]:
    """In a fresh process."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=_child, args=(theirs, engine, kind, asked))
    process.start()
    theirs.close()
    try:
        row: dict[str, Any] = ours.recv()
    except EOFError:
        row = {"took": 0.0, "compiling": 0.0, "longest": 0.0, "found": "it died", "over": 1.0}
    process.join()
    row.setdefault("over", row["took"] - row["compiling"] - TIMES * asked - row["longest"])
    return row


def _child(to: Any, engine: str, kind: str, asked: float) -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as empty:
        os.environ["SPEEDKIT_DATA"] = os.path.join(empty, "learned")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(empty, "compiled")
        step = KINDS[kind]()
        run = ENGINES[engine](step, asked)
        began = time.perf_counter()
        with redirect_stdout(StringIO()):
            found = run()
        took = time.perf_counter() - began
        longest, compiling = step.seen()
        to.send({"took": took, "longest": longest, "compiling": compiling, "found": found})


def _benchmark(step: Step, asked: float, variants: str = VARIANTS) -> Callable[[], str]:
    from speedkit_jupyter import benchmark

    def run() -> str:
        found = benchmark(
            step, variants, model=step.model, optimizer=step.optimizer, budget_s=asked
        )
        told = [found.verdict(one) for one in found.records[1:] if one.times_s]
        return f"{len(found.baseline.times_s)} rounds; {', '.join(told)}"

    return run


def _compile(step: Step, asked: float) -> Callable[[], str]:
    return _benchmark(step, asked, "baseline,compile,fused_optimizer")


def _tune(step: Step, asked: float) -> Callable[[], str]:
    from speedkit_jupyter import tune

    def run() -> str:
        found = tune(step, model=step.model, optimizer=step.optimizer, budget_s=asked)
        return found.winner.name if found.confirmed else (found.unclear[:60] or "nothing helps")

    return run


def _timing(step: Step, asked: float) -> Callable[[], str]:
    return _cell(step, f"-q -o --budget {asked:g}")


def _magic(step: Step, asked: float) -> Callable[[], str]:
    return _cell(step, f"--compare {VARIANTS} --budget {asked:g}")


def _cell(step: Step, line: str) -> Callable[[], str]:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "speedkit_jupyter")
    importlib.import_module("speedkit_jupyter.magics.speedbench")
    shell.user_ns.update(step=step, model=step.model, optimizer=step.optimizer)

    def run() -> str:
        shell.run_cell_magic("speedbench", line, "step()")
        return ""

    return run


ENGINES: dict[str, Callable[[Step, float], Callable[[], str]]] = {
    "benchmark": _benchmark,
    "tune": _tune,
    "timing": _timing,
    "magic": _magic,
    "compile": _compile,
}


def _row(kind: str, engine: str, beside: int, asked: float, row: dict[str, Any]) -> str:
    numbers = [f"{row[one]:.2f}" for one in ("took", "over", "compiling", "longest")]
    numbers[1] = numbers[1] if row["over"] > 0 else "–"
    return f"| {kind} | {engine} | {beside} | {asked:g} | {' | '.join(numbers)} | {row['found']} |"


if __name__ == "__main__":
    sys.exit(main())
