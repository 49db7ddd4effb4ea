"""Rows that a benchmark program appends to a file, each with the state of the code."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


def state_of_code() -> str:
    """The commit, with a plus where files differ from it."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        found = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
        return found.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../../speedkit_jupyter")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def read(file: Path) -> list[Row]:
    """All rows, oldest first."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def append(file: Path, row: Row) -> None:
    """One more."""
    with file.open("a") as opened:
        opened.write(json.dumps(row) + "\n")


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Nothing is learned, nor compiled."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as empty:
        os.environ["SPEEDKIT_DATA"] = str(Path(empty) / "learned")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(empty) / "compiled")
        yield


def line_of(cells: list[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"
