"""Check that the committed notebooks' outputs come from working code on a quiet machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from speedkit_jupyter.rounds.statistics import INTERVAL

NOTEBOOKS = sorted(Path(__file__).parent.glob("*.ipynb"))
AGAIN = "execute it anew on a quiet machine: python notebooks/run.py --in-place {}"


def outputs(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield each output of a notebook with the number of its cell."""
    for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
        for output in cell.get("outputs", []):
            yield number, output


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the text of each output, without HTML tags, with the number of its cell."""
    for number, output in outputs(path):
        shown = [output.get("text", ""), *output.get("data", {}).values()]
        for one in shown:
            if isinstance(one, str):
                yield number, re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", one))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_every_cell_was_run_in_order(path):
    cells = [one for one in nbformat.read(path, as_version=4).cells if one.cell_type == "code"]
    assert [one.execution_count for one in cells] == [*range(1, len(cells) + 1)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_no_cell_shows_an_error_or_writes_to_stderr(path):
    for number, output in outputs(path):
        assert output.output_type != "error", f"cell {number}: {output.get('evalue')}"
        stderr = output.output_type == "stream" and output.name == "stderr"
        assert not stderr, f"cell {number} of {path.name}: {output.get('text')}"


@pytest.mark.parametrize("words", ["Nothing is proven faster", "too noisy", "too few rounds"])
def test_the_quickstart_is_in_no_doubt(words):
    path = next(one for one in NOTEBOOKS if one.name.startswith("01"))
    doubts = [number for number, text in texts(path) if words in text]
    assert not doubts, f"{words!r} in cells {doubts}: {AGAIN.format(path.name)}"


def test_the_quickstart_has_a_verdict_with_its_interval():
    path = next(one for one in NOTEBOOKS if one.name.startswith("01"))
    verdict = re.compile(rf"[\d.]+× as fast as baseline, {INTERVAL} [\d.]+× to [\d.]+×")
    found = [match[0] for _, text in texts(path) if (match := verdict.search(text))]
    assert found, AGAIN.format(path.name)
