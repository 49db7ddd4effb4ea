"""Under nbval each budget is a quarter of what the cell says: outputs are not compared."""

from __future__ import annotations

import re

import pytest

BUDGET = re.compile(r"(--budget |budget_s=)(\d+)")
# Magics without a budget of their own.
DEFAULT = re.compile(
    r"(?m)^(%%speedbench --tune|%speedkit advise|%%speedbench(?= -v \w+$))(?!.* --budget)"
)


def shortened(source: str) -> str:
    """The same cell in less time."""
    source = DEFAULT.sub(r"\1 --budget 12", source)
    return BUDGET.sub(lambda found: f"{found[1]}{int(found[2]) / 4:.1f}", source)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only in what the kernels are sent: the notebooks stay as they are."""
    for item in items:
        if (cell := getattr(item, "cell", None)) is not None:
            cell.source = shortened(cell.source)
