"""Under nbval cells measure and repeat less than they say: most outputs are not compared."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from pathlib import Path

import pytest

BUDGET = re.compile(r"(--budget |budget_s=)(\d+)")
# Runs of %timeit and of the benchmark, and steps of trainings that are long or slow.
STEPS = re.compile(r"(-n |--steps |steps=|STEPS = 64, 16, |scales = .*\nfor _ in range\()(\d\d+)")
HELD_OUT = re.compile(r"held_out = len\(x\) // 5")
# Magics without a budget of their own.
DEFAULT = re.compile(
    r"(?m)^(%%speedbench --tune|%speedkit advise|%%speedbench(?= -v \w+$))(?!.* --budget)"
)

# Inductor asks the C++ compiler which vector instructions work, for seconds in every kernel.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# torch's keys for compiled code leave out which instructions it may use.
ALLOWED = os.environ.get("ATEN_CPU_CAPABILITY", "")
COMPILED = Path(tempfile.gettempdir(), f"speedkit_notebooks_{getpass.getuser()}{ALLOWED}")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(COMPILED))
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(COMPILED / "extensions"))  # not in a closed home


def shortened(source: str) -> str:
    """The same cell in less time."""
    source = DEFAULT.sub(r"\1 --budget 8", source)
    source = STEPS.sub(lambda found: f"{found[1]}{int(found[2]) // 4}", source)
    source = HELD_OUT.sub("held_out = len(x) // 20", source)
    return BUDGET.sub(lambda found: f"{found[1]}{budget_s(int(found[2])):.2f}", source)


def budget_s(said_s: int) -> float:
    """An eighth, but at least a second, or a quarter of what is short."""
    return max(said_s / 8, min(said_s / 4, 1.0))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only in what the kernels are sent: the notebooks stay as they are."""
    for item in items:
        if (cell := getattr(item, "cell", None)) is not None:
            cell.source = shortened(cell.source)
