"""The same work for the same sample, again in every epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from speedkit_jupyter.advice.gain import Gain, amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules import trials
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.rules.data.in_memory import is_in_memory
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.loading.samples import Samples
from speedkit_jupyter.loading.settings import Settings
from speedkit_jupyter.loading.tuned_loader import rebuilt
from speedkit_jupyter.loading.ways import Ways
from speedkit_jupyter.support.words import share

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# Drawing samples has to take this share of the step, and each as long as several copies of it.
LEAST, COPIES = 0.2, 2
# A copy of a sample in place of making it, at the least; at best nothing of loading is left.
TIMES = 3.0


class KeptSamples(Rule):
    """Samples that are the same whenever they are drawn, and fit into memory."""

    name: ClassVar[str] = "kept_samples"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """For each loader that the step goes through without workers."""
        data = seen.share("data")
        for number, loader in enumerate(seen.loaders if data >= LEAST else ()):
            draws = seen.watched.draws.get(id(loader))
            if draws is None or not draws.next_s or loader.num_workers or loader.batch_size is None:
                continue
            if is_in_memory(loader.dataset) or not isinstance(loader.batch_size, int):
                continue
            drawn = self._looked_at(seen, loader)
            if drawn is None or drawn.draw_s < COPIES * drawn.copy_s:
                continue
            # Of what the profile says: watching slows Python's calls down.
            batch_s = data * seen.step_s * seen.steps / len(draws.next_s)
            taken = data * min(drawn.draw_s * loader.batch_size / batch_s, 0.95)
            if taken < LEAST:
                continue
            called = seen.name(loader, "the DataLoader")
            low, high = amdahl(taken, TIMES).low, amdahl(min(data, 0.95), 1e9).low
            yield Opportunity(
                self.name,
                f"make the samples of {called} once, and keep them",
                f"data: {share(data)} of the step; each sample is made anew whenever it is drawn, "
                "and is the same each time",
                Gain(low, max(low, high)),
                "samples = [dataset[i] for i in range(len(dataset))] in place of the data set; "
                "%speedkit loader does it, and measures",
                "the first epoch takes as long as now; memory: "
                f"{drawn.size_bytes * _length(loader) / 2**20:,.3g} MiB",
                trial=trials.other_loader(seen, number, _kept),
            )

    @staticmethod
    def _looked_at(seen: Situation, loader: DataLoader[Any]) -> Samples | None:
        """Some samples, where all of them may be kept."""
        drawn = seen.samples(loader)
        if drawn is None or Ways(loader, drawn, seen.cores, seen.device).why_not_kept():
            return None
        return drawn


def _length(loader: DataLoader[Any]) -> int:
    dataset: Any = loader.dataset
    return len(dataset)


def _kept(loader: DataLoader[Any]) -> DataLoader[Any]:
    return rebuilt(loader, Settings(kept="memory"))
