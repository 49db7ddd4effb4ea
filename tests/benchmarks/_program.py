"""Shared by the benchmark programs: rows in a file, interleaved rounds, tables, processes."""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from speedkit_jupyter import Hardware
from speedkit_jupyter.machines import compile_cache
from speedkit_jupyter.plans.planning import describe
from speedkit_jupyter.rounds.statistics import Ratio, paired_ratio

Row = dict[str, Any]


def parser_of(doc: str | None, file: str) -> argparse.ArgumentParser:
    """Return the parser of a program that appends its rows to a file."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--file", type=Path, default=Path(file))
    parser.add_argument("--table", action="store_true", help="print the file's rows")
    return parser


def collected(
    options: argparse.Namespace,
    keys: Iterable[Row],
    measured: Callable[..., Row],
    line: Callable[[Row], str],
) -> list[Row]:
    """Return the rows of the newest state of the code, in the order of their keys.

    Each key that this state of the code has no row for yet is measured first, and its row appended
    to the file: a run that was stopped goes on. With `--table` nothing is measured.
    """
    keys, state = list(keys), state_of_code()
    for key in () if options.table else keys:
        name = " ".join(map(str, key.values()))
        done = any(row["state"] == state and _has(row, key) for row in read(options.file))
        if done or options.only.lower() not in name.lower():
            continue
        begun_s = time.perf_counter()
        torch.manual_seed(0)
        with nothing_kept():
            row = {"state": state, "machine": machine(), **key, **measured(**key)}
        append(options.file, row)
        print(f"{time.perf_counter() - begun_s:4.0f} s  {line(row)}", flush=True)
    rows = [row for row in read(options.file) if any(_has(row, key) for key in keys)]
    newest = [row for row in rows if row["state"] == rows[-1]["state"]]
    found = ([row for row in newest if _has(row, key)] for key in keys)
    return [some[-1] for some in found if some]


def _has(row: Row, key: Row) -> bool:
    return key.items() <= {name: row.get(name) for name in key}.items()


def state_of_code() -> str:
    """Return the commit, with a plus where files of the package differ from it."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        found = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
        return found.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../../speedkit_jupyter")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def read(file: Path) -> list[Row]:
    """Return all rows, oldest first."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def append(file: Path, row: Row) -> None:
    with file.open("a") as opened:
        opened.write(json.dumps(row) + "\n")


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Begin the block with nothing learned and nothing compiled."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as empty:
        folders = {"SPEEDKIT_DATA": "learned", "TORCHINDUCTOR_CACHE_DIR": "compiled"}
        paths = {name: str(Path(empty) / folder) for name, folder in folders.items()}
        with mock.patch.dict(os.environ, paths):
            yield


def load_all() -> None:
    """Load libraries, try the compiler and measure this machine's engines, once."""
    import_module("scipy.special")
    compile_cache.prepare()
    torch.compile(torch.nn.Linear(2, 2))(torch.rand(1, 2)).sum().backward()
    Hardware.detect().with_gemm()
    gc.collect()  # the objects of these calls


def interleaved_s(steps: dict[Any, Callable[[], object]], rounds: int) -> dict[Any, list[float]]:
    """Return the seconds of each call, in shuffled rounds after one that is not timed."""
    times: dict[Any, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name in random.sample([*steps], len(steps)):
            begun_s = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - begun_s)
    return times


def ratio(first: Callable[[], object], second: Callable[[], object], rounds: int) -> Ratio:
    """Return the time of `first` divided by the time of `second`."""
    times = interleaved_s({"first": first, "second": second}, rounds)
    return paired_ratio(times["first"], times["second"])


def over(first: Sequence[float], second: Sequence[float]) -> list[float] | None:
    """Return how many times as fast the second is, with its interval; None without times."""
    pairs = min(len(first), len(second))
    if not pairs:
        return None
    found = paired_ratio(first[:pairs], second[:pairs])
    return [found.median, found.low, found.high]


def machine(device: str = "cpu") -> str:
    """Return the line that every table begins with."""
    hardware = Hardware.detect()
    return f"{describe(hardware, device)}, torch {hardware.torch}, Python {hardware.python}"


def markdown(*lines: Sequence[object]) -> str:
    """Return a table, whose head is the first line."""
    head, *rows = lines
    return "\n".join(
        f"| {' | '.join(map(str, one))} |" for one in (head, ["---"] * len(head), *rows)
    )


def interval(found: Sequence[float | None] | None, missing: str = "–") -> str:
    """Return `1.23× [1.20, 1.26]`."""
    if not found or found[0] is None:
        return missing
    middle, low, high = found
    if not low or high in (None, float("inf")):
        return f"{middle:.2f}×, too few rounds"
    return f"{middle:.2f}× [{low:.2f}, {high:.2f}]"


def exit_code(broken: Sequence[str]) -> int:
    """Print which promises are broken, and return the program's exit status."""
    print("\n".join(["", *broken] if broken else ["", "every promise holds"]))
    return 1 if broken else 0


def printed_by(code: str, times: int) -> list[float]:
    """Return the number that this code prints in each of several fresh processes."""
    run = [sys.executable, "-c", code]
    return [float(subprocess.check_output(run, text=True, stderr=subprocess.DEVNULL))
            for _ in range(times)]  # fmt: skip
