"""Provide command-line options, result files and empty stores for benchmark programs."""

import argparse
import gc
import itertools
import json
import os
import subprocess
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

Row = dict[str, Any]


def plain_parser(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with an option for each keyword argument, of its default's type."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"({value})")
    return parser


def parser_of(doc: str | None, file: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return the parser of a program that appends its rows to a file."""
    parser = plain_parser(doc, **defaults)
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--file", type=Path, default=Path(file))
    parser.add_argument("--table", action="store_true", help="print the file's rows")
    return parser


def product(**values: Iterable[Any]) -> list[Row]:
    """Return the keys of rows: one key for each combination of the values."""
    return [dict(zip(values, some, strict=True)) for some in itertools.product(*values.values())]


def collected(
    options: argparse.Namespace, keys: Iterable[Row], measured: Callable[..., Row],
    shown: Callable[[Row], str | Sequence[object]],
) -> list[Row]:  # fmt: skip
    """Return the rows of the newest state of the code, in the order of their keys.

    First measure each key that has no row from the present code and whose name contains `--only`.
    Append its row to the file, so a stopped run can go on. With `--table`, measure nothing.
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
        found = shown(row)
        line = found if isinstance(found, str) else " | ".join(map(str, found))
        print(f"{time.perf_counter() - begun_s:4.0f} s  {line}", flush=True)
    rows = [row for row in read(options.file) if any(_has(row, key) for key in keys)]
    newest = [row for row in rows if row["state"] == rows[-1]["state"]]
    found = ([row for row in newest if _has(row, key)] for key in keys)
    return [some[-1] for some in found if some]


def _has(row: Row, key: Row) -> bool:
    return key.items() <= {name: row.get(name) for name in key}.items()


def state_of_code() -> str:
    """Return the commit, with a plus if files of the package differ from it."""

    def git(*words: str) -> str:
        run = {"cwd": Path(__file__).parent, "capture_output": True, "text": True}
        return subprocess.run(["git", *words], **run).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../../speedkit_jupyter")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def read(file: Path) -> list[Row]:
    lines = file.read_text().splitlines() if file.exists() else ()
    return [json.loads(line) for line in lines if line]


def append(file: Path, row: Row) -> None:
    with file.open("a") as opened:
        opened.write(json.dumps(row) + "\n")


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Run the block with empty stores of learned plans and compiled code."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as empty:
        folders = {"SPEEDKIT_DATA": "learned", "TORCHINDUCTOR_CACHE_DIR": "compiled"}
        paths = {name: str(Path(empty) / folder) for name, folder in folders.items()}
        with mock.patch.dict(os.environ, paths):
            yield


def load_all() -> None:
    """Load libraries, compile once, and measure BLAS and oneDNN, before a program measures time."""
    import_module("scipy.special")
    compile_cache.prepare()
    torch.compile(torch.nn.Linear(2, 2))(torch.rand(1, 2)).sum().backward()
    Hardware.detect().with_gemm()
    gc.collect()  # frees the objects of these calls


def machine(device: str = "cpu") -> str:
    """Return the line with device and versions that every table begins with."""
    hardware = Hardware.detect()
    return f"{hardware.describe(device)}, torch {hardware.torch}, Python {hardware.python}"
