"""A DataLoader that loads in the process that trains, while the cores wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from speedkit_jupyter.advice.gain import Gain
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules import trials
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.rules.data.in_memory import is_in_memory
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.loading.obstacles import is_iterable, why_no_workers, why_not_sent
from speedkit_jupyter.support.words import share

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

LEAST, HALF, MOST_WORKERS, LEAST_DRAWN = 0.08, 0.5, 4, 4


class Workers(Rule):
    """Data takes a part of the step, and nobody loads it meanwhile."""

    name: ClassVar[str] = "workers"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """For each loader that the step goes through."""
        data = seen.share("data")
        if data < LEAST or seen.cores < 2:
            return
        for number, loader in enumerate(seen.loaders):
            if loader.num_workers or not (_can_have_some(seen, loader) and _is_used(seen, loader)):
                continue
            workers = min(seen.cores if data > HALF else seen.cores - 1, MOST_WORKERS)
            called = seen.name(loader, "DataLoader")
            yield Opportunity(
                self.name,
                f"load the batches of {called} in worker processes",
                f"data: {share(data)} of the step waits for the loader, 0 workers, "
                f"{seen.cores} cores",
                _gain(seen, data, workers),
                f"DataLoader(…, num_workers={workers}, persistent_workers=True); %speedkit loader "
                "finds how many are best, and gives the same order",
                "random numbers that the data set draws are each worker's own; a shuffled order is "
                "another one from the second loop on",
                trial=trials.other_loader(seen, number, partial(with_workers, workers)),
                part="data",
            )


def _can_have_some(seen: Situation, loader: DataLoader[Any]) -> bool:
    """Return whether `%speedkit loader` would try some. Tensors in memory need none."""
    if is_iterable(loader) or loader.batch_sampler is None or is_in_memory(loader.dataset):
        return False
    drawn = seen.samples(loader)
    if drawn is None or why_no_workers(loader, drawn, None):
        return False
    return not (drawn.keys and why_not_sent(loader, drawn.keys[: loader.batch_size or 1]))


def _is_used(seen: Situation, loader: DataLoader[Any]) -> bool:
    """Workers begin with several batches: who takes one and begins anew has nothing of them."""
    draws = seen.watched.draws.get(id(loader))
    if draws is not None and len(draws.next_s) < LEAST_DRAWN * len(draws.begun_s):
        return False
    return id(loader) in seen.watched.draws or (
        set(seen.watched.draws) == {0} and len(seen.loaders) == 1
    )


def _gain(seen: Situation, data: float, workers: int) -> Gain:
    """At best loading is hidden behind computing. Each loop over the loader begins with a batch
    that nobody has loaded yet.

    On a CPU computing loses cores to the workers, and at worst half of its speed: its threads wait
    for the one whose core a worker has. (Measured: loading took 48 % of a small CNN's step on two
    cores, and one or two workers made it 0.83 and 0.87 times as fast.)
    """
    computing = 1 - data
    loops = max(len(draws.begun_s) for draws in seen.watched.draws.values())
    first = data * loops / seen.steps
    best = max(computing, data / workers)
    worst = max(best, computing * (2.0 if seen.on_cpu else 1.1)) + first
    return Gain(1 / worst, 1 / best)


def with_workers(workers: int, loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader, with worker processes that stay."""
    from torch.utils.data import DataLoader

    return DataLoader(
        loader.dataset,
        batch_sampler=loader.batch_sampler,
        num_workers=workers,
        collate_fn=loader.collate_fn,
        persistent_workers=True,
    )
