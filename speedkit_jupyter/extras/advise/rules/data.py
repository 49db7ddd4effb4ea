"""Rules about waiting for data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from torch.utils.data import DataLoader

from speedkit_jupyter.extras.advise import trials
from speedkit_jupyter.extras.advise.advice import Gain, Opportunity, amdahl, without
from speedkit_jupyter.extras.advise.observed_call import LoaderTimes
from speedkit_jupyter.extras.advise.situation import Situation
from speedkit_jupyter.extras.data.loader_samples import why_no_workers
from speedkit_jupyter.extras.data.loader_settings import (
    LoaderSettings,
    is_iterable,
    takes_whole_batches,
)
from speedkit_jupyter.support import units
from speedkit_jupyter.support.units import count, share

# Samples are kept if drawing them takes this share of the step: they fill memory.
KEEPING = 0.2


def _drawn(seen: Situation, least: float) -> Iterator[tuple[int, DataLoader[Any], LoaderTimes]]:
    """Yield the numbered loaders that the step draws from, if data takes a `least` share of it."""
    for number, loader in enumerate(seen.loaders if seen.share("data") >= least else ()):
        if draws := seen.observed.draws.get(id(loader)):
            yield number, loader, draws


def in_memory(seen: Situation) -> Iterator[Opportunity]:
    """Find tensors in memory that are loaded one by one and stacked again."""
    data = seen.share("data")
    for number, loader, _ in _drawn(seen, 0.05):
        if not takes_whole_batches(loader):
            continue
        settings = replace(LoaderSettings.of(loader).with_workers(0), whole_batches=True)
        yield Opportunity(
            f"draw whole batches of {seen.name(loader, 'the DataLoader')} at once",
            f"data: {share(data)} of the step; the data set is in memory, and is indexed "
            f"sample by sample ({loader.batch_size} a batch)",
            amdahl(data, 4.0, 50.0),
            "DataLoader(dataset, sampler=BatchSampler(RandomSampler(dataset), batch_size, "
            "drop_last=False), batch_size=None)",
            trial=trials.other_loader(seen.lasting, number, settings),
            part="data",
        )


def kept_samples(seen: Situation) -> Iterator[Opportunity]:
    """Find samples that are made anew each time, are always the same, and fit into memory."""
    import psutil

    data, free_bytes = seen.share("data"), psutil.virtual_memory().available
    for _, loader, draws in _drawn(seen, KEEPING):
        dataset: Any = loader.dataset
        if not draws.next_s or loader.num_workers or not hasattr(dataset, "__len__"):
            continue
        drawn = None if takes_whole_batches(loader) else seen.samples(loader)
        # Indexing tensors in memory takes some 5 µs a sample, decoding or parsing hundreds.
        if drawn is None or drawn.draw_s < 5e-5 or drawn.is_random:
            continue
        size = drawn.size_bytes * len(dataset)
        # From the profile: observing slows Python's calls down.
        batch_s = data * seen.step_s * seen.steps / len(draws.next_s)
        taken = data * min(drawn.draw_s * (loader.batch_size or 1) / batch_s, 0.95)
        if size > 0.25 * free_bytes or taken < KEEPING:
            continue
        yield Opportunity(
            f"make the samples of {seen.name(loader, 'the DataLoader')} once, and keep them",
            f"data: {share(data)} of the step; each sample is made anew whenever it is drawn, "
            "and is the same each time",
            Gain(amdahl(taken, 3.0).low, without(min(data, 0.95))),
            "samples = [dataset[i] for i in range(len(dataset))] in place of the data set, and "
            "again after each change of it",
            f"the first epoch takes as long as now; memory: {units.size(size)}",
            part="data",
        )


def workers(seen: Situation) -> Iterator[Opportunity]:
    """Find loaders without workers, which load while the step waits."""
    data = seen.share("data")
    for number, loader, draws in _drawn(seen, 0.08) if seen.cores > 1 else ():
        # Workers begin with several batches: a loop has to draw four or more.
        is_short = len(draws.next_s) < 4 * len(draws.begun_s)
        if loader.num_workers or is_short or not _takes_workers(seen, loader):
            continue
        # Where loading takes most of the step, the training process leaves its core to a worker.
        many = min(seen.cores if data > 0.5 else seen.cores - 1, 4)
        settings = LoaderSettings.of(loader).with_workers(many)
        yield Opportunity(
            f"load the batches of {seen.name(loader, 'DataLoader')} in worker processes",
            f"data: {share(data)} of the step waits for the loader, 0 workers, {seen.cores} cores",
            _gain_of_workers(seen, data, many),
            f"DataLoader(…, num_workers={many}); %speedkit loader finds the best number",
            "random numbers that the data set draws are each worker's own",
            trial=trials.other_loader(seen.lasting, number, settings),
            part="data",
        )


def _takes_workers(seen: Situation, loader: DataLoader[Any]) -> bool:
    """Return whether `%speedkit loader` would try workers. Tensors in memory need none."""
    if is_iterable(loader) or loader.batch_sampler is None or takes_whole_batches(loader):
        return False
    drawn = seen.samples(loader)
    return drawn is not None and not why_no_workers(loader, drawn)


def _gain_of_workers(seen: Situation, data: float, number: int) -> Gain:
    """Return the gain of workers, which hide loading behind computing at best.

    On a CPU computing loses cores to the workers, at worst half of its speed, and then loading is
    not hidden: a small CNN on two cores, half of whose step was loading, was 0.82 to 0.87 times as
    fast with one or two workers. Each loop's first batch is waited for.
    """
    computing = 1 - data
    loops = max(len(draws.begun_s) for draws in seen.observed.draws.values())
    best = max(computing, data / number)
    alone = computing * 2.0 + data / number if seen.on_cpu else computing * 1.1
    worst = max(best, alone) + data * loops / seen.steps
    return Gain(1 / worst, 1 / best)


def worker_start(seen: Situation) -> Iterator[Opportunity]:
    """Find workers that are started again for every loop over the loader."""
    for _, loader, draws in _drawn(seen, 0.0):
        if not loader.num_workers or loader.persistent_workers:
            continue
        each_s = median(draws.next_s[1:] or draws.next_s or [0.0])
        waited_s = sum([*draws.begun_s, *draws.next_s, *draws.ended_s])
        starting_s = waited_s - len(draws.next_s) * each_s
        taken = min(starting_s / (seen.step_s * seen.steps), 0.95)
        if taken < 0.05:
            continue
        yield Opportunity(
            f"keep the workers of {seen.name(loader, 'the DataLoader')} between epochs",
            f"{count(loader.num_workers, 'worker')} started and ended in "
            f"{count(len(draws.begun_s), 'loop')} over the loader: {share(taken)} of the time",
            amdahl(taken, 2.0, 50.0),
            "DataLoader(…, persistent_workers=True)",
            "the workers keep their memory between epochs",
            part="data",
        )
