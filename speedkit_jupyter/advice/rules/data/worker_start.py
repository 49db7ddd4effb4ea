"""Workers that are started again for every epoch."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import ClassVar

from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import count, share

LEAST = 0.05


class WorkerStart(Rule):
    """The time until a worker's first batch, once more for each loop over the loader."""

    name: ClassVar[str] = "worker_start"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """For each loader with workers that do not stay."""
        for loader in seen.loaders:
            draws = seen.watched.draws.get(id(loader))
            if not loader.num_workers or loader.persistent_workers or draws is None:
                continue
            epochs = len(draws.begun_s)
            each_s = median(draws.next_s[1:] or draws.next_s or [0.0])
            waited_s = sum([*draws.begun_s, *draws.next_s, *draws.ended_s])
            starting_s = waited_s - len(draws.next_s) * each_s
            part = starting_s / (seen.step_s * seen.steps)
            if part < LEAST:
                continue
            yield Opportunity(
                self.name,
                f"keep the workers of {seen.name(loader, 'the DataLoader')} between epochs",
                f"{share(part)} of the time goes by until {count(loader.num_workers, 'worker')} "
                f"started and ended, in {count(epochs, 'loop')} over the loader",
                amdahl(min(part, 0.95), 2.0, 50.0),
                "DataLoader(…, persistent_workers=True)",
                "the workers keep their memory between epochs",
                part="data",
            )
