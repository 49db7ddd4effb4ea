"""What the machine counts of a profiled step: its energy, say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.checks.counted_columns import LEAST_S, QUANTITIES

if TYPE_CHECKING:
    import torch


class Counters:
    """Sums of each quantity that is counted on a device, over the calls that are made by it."""

    def __init__(self, device: torch.device) -> None:
        meters = ((quantity.name, quantity.meter(device)) for quantity in QUANTITIES)
        self._meters = {name: read for name, read in meters if read is not None}
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counted_s = 0.0

    def counted(self, call: Callable[[], float]) -> float:
        """Make a call, which returns its seconds."""
        __tracebackhide__ = True
        before = {name: read() for name, read in self._meters.items()}
        took_s = call()
        for name, read in self._meters.items():
            self._sums[name] += read() - before[name]
        self._counted_s += took_s
        return took_s

    def each_second(self) -> dict[str, float]:
        """Return the rates; nothing where calls were too short for counters that move rarely."""
        if self._counted_s < LEAST_S:
            return {}
        return {name: value / self._counted_s for name, value in self._sums.items()}
