"""What torch.compile did while a variant ran: graphs, breaks, recompilations."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from speedkit_jupyter.support import torch_private


@dataclass
class Compilations:
    """Counts, and whether Dynamo gave up on a function and runs it as plain Python."""

    graphs: int = 0
    breaks: int = 0
    recompiles: int = 0
    limit_reached: bool = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What is compiled inside the block is added. Reads torch's counters, resets nothing."""
        before = _totals()
        try:
            yield
        finally:
            self._add(before, _totals())

    def _add(self, before: _Totals, after: _Totals) -> None:
        self.graphs += after.graphs - before.graphs
        self.breaks += after.breaks - before.breaks
        self.limit_reached |= after.limits > before.limits
        if after.newest is not before.newest:
            self.recompiles += _recompiles_since(before.newest)


def graphs() -> int:
    """How many graphs this process has compiled."""
    return _totals().graphs


@dataclass(frozen=True)
class _Totals:
    graphs: int = 0
    breaks: int = 0
    limits: int = 0
    newest: Any = None


def _totals() -> _Totals:
    """Counters of the process; all zero while Dynamo has not been loaded."""
    if f"{torch_private.COMPILERS[0]}.utils" not in sys.modules:
        return _Totals()
    counters, metrics = torch_private.compile_counters(), torch_private.compilations()
    return _Totals(
        counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()),
        sum(n for reason, n in counters["unimplemented"].items() if _is_limit(reason)),
        metrics[-1] if metrics else None,
    )


def _is_limit(reason: str) -> bool:
    first = reason.partition("\n")[0].lower()
    return "recompile" in first and "limit" in first


def _recompiles_since(newest: Any) -> int:
    """Compilations whose guards name the reason why earlier code did not fit."""
    count = 0
    for metrics in reversed(torch_private.compilations()):
        if metrics is newest:
            break
        count += bool(metrics.recompile_reason)
    return count
