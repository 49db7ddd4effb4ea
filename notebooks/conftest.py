"""Give notebook cells smaller budgets and fewer steps when nbval runs them."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from pathlib import Path

import pytest

BUDGET = re.compile(r"(--budget |budget_s=)(\d+)")
# Numbers of 10 or more: runs of %timeit and of the benchmark, and training steps.
STEPS = re.compile(r"(-n |--steps |steps=|STEPS = 64, 16, |scales = .*\nfor _ in range\()(\d\d+)")
HELD_OUT = re.compile(r"held_out = len\(x\) // 5")
# Magics whose line sets no budget.
DEFAULT = re.compile(
    r"(?m)^(%%speedbench --tune|%speedkit advise|%%speedbench(?= -v \w+$))(?!.* --budget)"
)

# Skip Inductor's test of vector instructions, which takes seconds in each Jupyter kernel.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# torch's cache keys omit the allowed vector instructions, so the folder's name has them.
ALLOWED = os.environ.get("ATEN_CPU_CAPABILITY", "")
COMPILED = Path(tempfile.gettempdir(), f"speedkit_notebooks_{getpass.getuser()}{ALLOWED}")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(COMPILED))
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(COMPILED / "extensions"))  # home may be read-only


def shortened(source: str) -> str:
    """Return a cell's source with smaller budgets and fewer steps."""
    source = DEFAULT.sub(r"\1 --budget 8", source)
    source = STEPS.sub(lambda found: f"{found[1]}{int(found[2]) // 4}", source)
    source = HELD_OUT.sub("held_out = len(x) // 20", source)
    return BUDGET.sub(lambda found: f"{found[1]}{budget_s(int(found[2])):.2f}", source)


def budget_s(said_s: int) -> float:
    """Return an eighth of a budget, but at least one second, or a quarter if that is less."""
    return max(said_s / 8, min(said_s / 4, 1.0))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shorten the cells that kernels receive; the notebook files stay unchanged."""
    for item in items:
        if (cell := getattr(item, "cell", None)) is not None:
            cell.source = shortened(cell.source)
