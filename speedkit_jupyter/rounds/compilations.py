"""Counts of torch.compile while a variant ran: graphs, breaks, recompilations."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from speedkit_jupyter.torchglue import dynamo as torch_private


@dataclass
class Compilations:
    """Counts, and whether Dynamo gave up on a function and runs it as plain Python."""

    graphs: int = 0
    breaks: int = 0
    recompiles: int = 0
    limit_reached: bool = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Add what is compiled inside the block. Reads torch's counters, resets nothing."""
        before = _totals()
        try:
            yield
        finally:
            graphs, breaks, limits, reasons = _totals()
            self.graphs += graphs - before[0]
            self.breaks += breaks - before[1]
            self.limit_reached |= limits > before[2]
            self.recompiles += len(reasons.keys() - before[3].keys())


def graphs() -> int:
    """Return how many graphs this process has compiled."""
    return _totals()[0]


def _totals() -> tuple[int, int, int, dict[int, Any]]:
    """Return graphs, breaks, limits that were reached, and the records of compilations whose guards
    name a reason why earlier code did not fit; none without Dynamo.
    """
    if f"{torch_private.COMPILERS[0]}.utils" not in sys.modules:
        return 0, 0, 0, {}
    counters = torch_private.compile_counters()
    unsupported = counters["unimplemented"].items()  # the first line of each reason names it
    limits = [count for why, count in unsupported if re.match(r".*recompile.limit", why, re.I)]
    reasons = {id(one): one for one in torch_private.compilations() if one.recompile_reason}
    breaks = sum(counters["graph_break"].values())
    return counters["stats"]["unique_graphs"], breaks, sum(limits), reasons
