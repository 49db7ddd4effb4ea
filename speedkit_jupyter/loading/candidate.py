"""One way to load: its settings, and what was measured of it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from speedkit_jupyter.loading.settings import Settings
from speedkit_jupyter.support.words import count

if TYPE_CHECKING:
    from speedkit_jupyter.loading.stream import Stream

# Source: torch/utils/data/dataloader.py, which raises a plain RuntimeError.
TIMED_OUT = re.compile(r"DataLoader timed out after ([\d.]+) seconds")
# Of a data set whose end was not seen, an epoch is taken to be so long.
LONG_EPOCH = 1000


@dataclass(eq=False)
class Candidate:
    """`times_s` are the seconds of a batch and its step, `waits_s` what of them went to waiting,
    by the number of the round. `why_out` is why it left the race; where it `is_stuck` its workers
    gave nothing. Where torch has so many `threads` beside it, it is no setting of the loader's, and
    only told of.
    """

    settings: Settings
    threads: int | None = None
    times_s: dict[int, float] = field(default_factory=dict)
    waits_s: list[float] = field(default_factory=list)
    begins_s: list[float] = field(default_factory=list)
    why_out: str = ""
    failure: str = ""
    is_stuck: bool = False
    stream: Stream | None = field(default=None, repr=False)

    def batch_s(self, epoch: int, number: int | None = None) -> float:
        """Seconds of a batch, in a round or in the middle, with its share of an epoch's start; in
        epochs of one batch that is part of each time already.
        """
        if not self.times_s:
            return math.inf
        own_s = median(self.times_s.values()) if number is None else self.times_s[number]
        return own_s if epoch == 1 else (own_s * (epoch - 1) + self.begin_s) / epoch

    @property
    def begin_s(self) -> float:
        """Seconds until an epoch's first batch is there; without those that start workers that
        stay, where another epoch was seen.
        """
        later = self.begins_s[1:] if self.settings.persistent_workers else self.begins_s
        return median(later or self.begins_s or [0.0])

    @property
    def waiting(self) -> float:
        """The share of its time that went to waiting for batches."""
        total_s = sum(self.times_s.values())
        return sum(self.waits_s) / total_s if total_s else 0.0

    @property
    def words(self) -> str:
        """`2 workers`, and the threads beside them."""
        beside = "" if self.threads is None else f", {count(self.threads, 'thread')} beside"
        return f"{self.settings.words}{beside}"

    @property
    def races(self) -> bool:
        """Whether it is measured still."""
        return not (self.why_out or self.failure)

    def fail(self, error: Exception) -> None:
        """It leaves the race, with the last line of what it raised; or as one that is stuck."""
        if (found := TIMED_OUT.search(str(error))) and self.settings.num_workers:
            self.is_stuck, self.why_out = True, f"gave no batch within {float(found[1]):.3g} s"
            self.close()
            return
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        kind, line = type(error).__name__, lines[-1] if lines else ""
        self.failure = line if line.startswith(f"{kind}:") else f"{kind}: {line}"
        self.close()

    def forget(self) -> None:
        """What was timed of it."""
        self.times_s.clear()
        self.waits_s.clear()

    def close(self) -> None:
        """No worker of it is left."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()
