"""Rules about waiting for data, and about what batches hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.advise import trials
from speedkit_jupyter.extras.advise.advice import Gain, Opportunity, amdahl, without
from speedkit_jupyter.extras.advise.observed_call import Draws
from speedkit_jupyter.extras.advise.situation import Situation
from speedkit_jupyter.extras.data.loader_samples import why_no_workers
from speedkit_jupyter.extras.data.loader_settings import (
    LoaderSettings,
    is_iterable,
    takes_whole_batches,
)
from speedkit_jupyter.support import units
from speedkit_jupyter.support.units import count, share


def _drawn(seen: Situation, least: float) -> Iterator[tuple[int, DataLoader[Any], Draws]]:
    """Yield the loaders that the step draws from, with their numbers, where waiting for data takes
    at least this share of it.
    """
    for number, loader in enumerate(seen.loaders if seen.share("data") >= least else ()):
        if draws := seen.watched.draws.get(id(loader)):
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
            f"data: {share(data)} of the step; the data set lies in memory, and is indexed "
            f"sample by sample ({loader.batch_size} a batch)",
            amdahl(data, 4.0, 50.0),
            "DataLoader(dataset, sampler=BatchSampler(RandomSampler(dataset), batch_size, "
            "drop_last=False), batch_size=None)",
            trial=trials.other_loader(seen.lasting, number, settings),
            part="data",
        )


# Drawing samples takes at least this share of the step, and each this long: to index tensors in
# memory takes some 5 µs, to decode or parse a sample hundreds. Kept, they may take this share of
# the memory that is free.
KEEPING, LEAST_S, KEPT_SHARE = 0.2, 5e-5, 0.25


def kept_samples(seen: Situation) -> Iterator[Opportunity]:
    """Find samples that are made anew each time, are always the same, and fit into memory."""
    import psutil

    data = seen.share("data")
    for _, loader, draws in _drawn(seen, KEEPING):
        dataset: Any = loader.dataset
        if not draws.next_s or loader.num_workers or not hasattr(dataset, "__len__"):
            continue
        drawn = None if takes_whole_batches(loader) else seen.samples(loader)
        if drawn is None or drawn.draw_s < LEAST_S or drawn.is_random:
            continue
        size = drawn.size_bytes * len(dataset)
        # Of what the profile says: watching slows Python's calls down.
        batch_s = data * seen.step_s * seen.steps / len(draws.next_s)
        taken = data * min(drawn.draw_s * (loader.batch_size or 1) / batch_s, 0.95)
        if size > KEPT_SHARE * psutil.virtual_memory().available or taken < KEEPING:
            continue
        yield Opportunity(
            f"make the samples of {seen.name(loader, 'the DataLoader')} once, and keep them",
            f"data: {share(data)} of the step; each sample is made anew whenever it is drawn, "
            "and is the same each time",
            Gain(amdahl(taken, 3.0).low, without(min(data, 0.95))),
            "samples = [dataset[i] for i in range(len(dataset))] in place of the data set, and "
            "again where it was changed",
            f"the first epoch takes as long as now; memory: {units.size(size)}",
            part="data",
        )


MOST_WORKERS, LEAST_DRAWN = 4, 4


def workers(seen: Situation) -> Iterator[Opportunity]:
    """Find loaders that nobody loads ahead of the step."""
    data = seen.share("data")
    for number, loader, draws in _drawn(seen, 0.08) if seen.cores > 1 else ():
        # Workers begin with several batches: one loop has to draw them.
        in_a_loop = len(draws.next_s) >= LEAST_DRAWN * len(draws.begun_s)
        if loader.num_workers or not in_a_loop or not _takes_workers(seen, loader):
            continue
        # Where loading takes most of the step, the training process leaves its core to a worker.
        many = min(seen.cores if data > 0.5 else seen.cores - 1, MOST_WORKERS)
        settings = LoaderSettings.of(loader).with_workers(many)
        yield Opportunity(
            f"load the batches of {seen.name(loader, 'DataLoader')} in worker processes",
            f"data: {share(data)} of the step waits for the loader, 0 workers, {seen.cores} cores",
            _gain_of_workers(seen, data, many),
            f"DataLoader(…, num_workers={many}); %speedkit loader finds how many are best",
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


def _gain_of_workers(seen: Situation, data: float, many: int) -> Gain:
    """Return at best what hides loading behind computing.

    On a CPU computing loses cores to the workers, at worst half of its speed, and then loading is
    hidden behind nothing: a small CNN on two cores, half of whose step was loading, was 0.82 to
    0.87 times as fast with one or two workers. Each loop's first batch is waited for.
    """
    computing = 1 - data
    loops = max(len(draws.begun_s) for draws in seen.watched.draws.values())
    best = max(computing, data / many)
    alone = computing * 2.0 + data / many if seen.on_cpu else computing * 1.1
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
            f"{share(taken)} of the time goes by until {count(loader.num_workers, 'worker')} "
            f"started and ended, in {count(len(draws.begun_s), 'loop')} over the loader",
            amdahl(taken, 2.0, 50.0),
            "DataLoader(…, persistent_workers=True)",
            "the workers keep their memory between epochs",
            part="data",
        )


def pin_memory(seen: Situation) -> Iterator[Opportunity]:
    """Find, on CUDA, loaders whose batches are copied from memory that is not pinned."""
    copying = seen.share("host to device")
    is_slow = seen.device.type == "cuda" and copying >= 0.03
    for loader in seen.loaders if is_slow else ():
        if not loader.pin_memory:
            yield Opportunity(
                f"pin the memory of {seen.name(loader, 'the DataLoader')}'s batches",
                f"host to device: {share(copying)} of the step, from memory that is not pinned",
                amdahl(copying, 1.3),
                "DataLoader(…, pin_memory=True), and x.to(device, non_blocking=True)",
                "main memory that can't be swapped out",
            )


def padding(seen: Situation) -> Iterator[Opportunity]:
    """Find batches of words that are padding for the most part."""
    found = [one for one in map(padded, seen.inputs) if one is not None]
    if not found or seen.computing < 0.2:
        return
    everywhere, behind = (sum(each) / len(found) for each in zip(*found, strict=True))
    if everywhere < 0.25:
        return
    # Cutting what lies behind the longest row is the least, batches of like lengths the most; what
    # goes by rows and not by words does not get faster.
    most = seen.computing * max(everywhere, behind)
    low, high = without(seen.computing * behind * 0.6), without(min(most, 0.95))
    yield Opportunity(
        "pad each batch to its own longest row, with rows of like length together",
        f"{share(everywhere)} of the words are padding, {share(behind)} of all lie behind the "
        f"longest row of their batch; forward and backward: {share(seen.computing)} of the step",
        Gain(low, max(low, high)),
        "pad in collate_fn (pad_sequence, or DataCollatorWithPadding), and sort into buckets "
        "by length",
        "batches of like lengths come in another order",
        share=most,
    )


def padded(words: torch.Tensor) -> tuple[float, float] | None:
    """Return the shares of padding, and of what lies behind the longest row, in rows of whole
    numbers: what the last column repeats. None for others.
    """
    if words.dim() != 2 or words.is_floating_point() or words.shape[1] < 8:
        return None
    lowest, highest = int(words.min()), int(words.max())
    # A mask and the numbers of two segments are no words, nor is one number everywhere.
    if lowest == highest or (lowest >= 0 and highest <= 1):
        return None
    values, times = words[:, -1].unique(return_counts=True)
    is_word = words != values[times.argmax()]
    width = words.shape[1]
    lengths = width - is_word.flip(1).int().argmax(1)  # behind the last word of each row
    lengths[~is_word.any(1)] = 0
    if not (lengths < width).any():
        return None
    return 1 - float(lengths.sum()) / words.numel(), 1 - int(lengths.max()) / width


# A batch of so many rows is tried with so many times as many, and must gain so much a sample.
MOST_ROWS, LARGER, LEAST_GAINED = 8, 4, 2.0


def small_batch(seen: Situation) -> Iterator[Opportunity]:
    """Find a batch so small that operators cost more than what they compute, by trying more."""
    calls = seen.calls
    if not (calls and seen.trains) or seen.computing < 0.3:
        return
    sizes = {one.shape[0] for one in calls[0].inputs if one.dim() > 1}
    rows = sizes.pop() if len(sizes) == 1 else MOST_ROWS + 1
    # Many calls with one row each are another rule's matter.
    if rows > MOST_ROWS or (rows == 1 and len(calls) > 4):
        return
    ratio = seen.ratio(calls[0].with_rows(LARGER), calls[0])
    each = 0.0 if ratio is None else LARGER / ratio
    if each < LEAST_GAINED:
        return
    whole = seen.computing + seen.share("optimizer", "rest", "synchronizations")
    yield Opportunity(
        f"take a larger batch than {rows}",
        f"the model takes {LARGER / each:.2f} times as long for {LARGER} times the batch",
        Gain(1 / (1 - whole * (1 - 1 / each) * 0.6), 1 / (1 - whole * (1 - 1 / (2 * each)))),
        f"batch_size={LARGER * rows}, and a learning rate for it: samples a second gain, not steps",
        "another batch is another training: its learning rate and results differ",
    )
