"""Tensors in memory that are loaded one by one and stacked again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules import trials
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

LEAST = 0.05
# A batch that is drawn by its indices at once is so many times as fast to load.
TIMES = (4.0, 50.0)


class InMemory(Rule):
    """A TensorDataset can give a whole batch by its indices."""

    name: ClassVar[str] = "in_memory"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """For each loader over tensors."""
        from torch.utils.data import default_collate

        data = seen.share("data")
        for number, loader in enumerate(seen.loaders if data >= LEAST else ()):
            draws = seen.watched.draws.get(id(loader))
            if (
                draws is None
                or loader.batch_sampler is None
                or loader.collate_fn is not default_collate
                or not is_in_memory(loader.dataset)
            ):
                continue
            yield Opportunity(
                self.name,
                f"draw whole batches of {seen.name(loader, 'the DataLoader')} at once",
                f"data: {share(data)} of the step; the data set lies in memory, and is indexed "
                f"sample by sample ({loader.batch_size} a batch)",
                amdahl(data, *TIMES),
                "DataLoader(dataset, sampler=BatchSampler(RandomSampler(dataset), batch_size, "
                "drop_last=False), batch_size=None)",
                trial=trials.other_loader(seen, number, whole),
                part="data",
            )


def is_in_memory(dataset: Any) -> bool:
    """Whether it takes a list of indices, and gives rows of tensors."""
    from torch.utils.data import TensorDataset

    return type(dataset) is TensorDataset


def whole(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same batches in the same order, each by one index."""
    from torch.utils.data import DataLoader

    return DataLoader(
        loader.dataset,
        sampler=loader.batch_sampler,
        batch_size=None,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
    )
