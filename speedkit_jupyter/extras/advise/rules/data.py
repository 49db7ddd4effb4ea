"""Rules of advice about data: loaders, their workers, and padding in batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.catalog.model_changes.calls import is_compiled
from speedkit_jupyter.extras.advise import advice
from speedkit_jupyter.extras.advise.advice import Gain, Opportunity, Remedy, Subject, amdahl
from speedkit_jupyter.extras.advise.situation import ObservedModelCall, Situation
from speedkit_jupyter.extras.data import loader_settings
from speedkit_jupyter.extras.data.bucketed import bucketed, few_lengths, keeps_loss, length_of
from speedkit_jupyter.extras.data.loader_settings import LoaderSettings
from speedkit_jupyter.support.units import count, share

# Minimum seconds to start and end a worker, measured in an idle process (AMD EPYC, 2 cores).
START_S = 0.06


def other_loader(
    seen: Situation, own: Any, settings: LoaderSettings, lengths: Sequence[int] = ()
) -> Remedy | None:
    """Return a remedy that rebuilds `own` with other settings; None if the step creates `own`."""
    numbers = [at for at, one in enumerate(seen.subject.loaders) if one is own]

    def replaced(subject: Subject) -> AbstractContextManager[None]:
        loader = subject.loaders[numbers[0]]
        rebuilt = loader_settings.rebuilt(loader, settings)
        if lengths:
            rebuilt.collate_fn = bucketed(loader.collate_fn, lengths)
        return loader_settings.begun_with(loader, partial(iter, rebuilt))

    return replaced if numbers else None


def in_memory(seen: Situation) -> Iterator[Opportunity]:
    """Find tensors in memory whose samples are loaded one by one and stacked into batches."""
    data = seen.share("data")
    for loader in (draws.loader for draws in seen.observed.draws.values()):
        if data < 0.05 or not loader_settings.takes_whole_batches(loader):
            continue
        settings = replace(LoaderSettings.of(loader), num_workers=0, whole_batches=True)
        yield Opportunity(
            f"draw whole batches of {seen.name(loader, 'the DataLoader')} at once",
            f"data: {share(data)} of the step; a data set in memory is indexed sample by sample",
            amdahl(data, 2.0, 50.0),
            loader_settings.source(loader, settings, seen.name(loader, "loader")),
            trial=other_loader(seen, loader, settings),
            part="data",
        )


def workers(seen: Situation) -> Iterator[Opportunity]:
    """Find loaders without workers for which the step waits."""
    data = seen.share("data")
    for draws in seen.observed.draws.values() if data >= 0.08 and seen.cores > 1 else ():
        # Workers load batches ahead, which gains little in loops of fewer than four batches.
        loader, is_short = draws.loader, len(draws.next_s) < 4 * draws.loops
        if loader.num_workers or is_short or not _takes_workers(seen, loader):
            continue
        # If loading takes most of the step, the training process leaves its core to a worker.
        many = min(seen.cores if data > 0.5 else seen.cores - 1, 4)
        settings = replace(LoaderSettings.of(loader), num_workers=many)
        yield Opportunity(
            f"load the batches of {seen.name(loader, 'DataLoader')} in worker processes",
            f"data: {share(data)} of the step waits for the loader, 0 workers, {seen.cores} cores",
            _gain_of_workers(seen, data, many),
            f"DataLoader(…, num_workers={many}); %speedkit loader finds the best number",
            "each worker draws its own random numbers in the data set",
            trial=other_loader(seen, loader, settings),
            part="data",
        )


def _takes_workers(seen: Situation, loader: DataLoader[Any]) -> bool:
    """Return whether worker processes can load the data; this may draw samples."""
    if loader.batch_sampler is None or loader_settings.takes_whole_batches(loader):
        return False
    seen.settle()
    with suppress(Exception):  # the data set's own errors, such as missing indices
        return not loader_settings.why_no_workers(loader, loader_settings.look_at(loader))
    return False


def _gain_of_workers(seen: Situation, data: float, number: int) -> Gain:
    """Return the expected gain of `number` workers if loading takes the share `data` of the step.

    At best, workers load while the step computes. At worst, each loop waits for its workers and its
    first batch, and on a CPU the computing takes twice as long. On two cores, a small CNN that
    spent half of its step loading was 0.82 to 0.87 times as fast with one or two workers.
    """
    computing = 1 - data
    loops = max(draws.loops for draws in seen.observed.draws.values())
    best = max(computing, data / number)
    alone = computing * 2.0 + data / number if seen.on_cpu else computing * 1.1
    worst = max(best, alone) + data * loops / seen.steps
    worst += START_S * number * loops / (seen.step_s * seen.steps)
    return Gain(1 / worst, 1 / best)


def worker_start(seen: Situation) -> Iterator[Opportunity]:
    """Find workers that start again for every loop over the loader."""
    for draws in seen.observed.draws.values():
        loader = draws.loader
        if not loader.num_workers or loader.persistent_workers:
            continue
        each_s = median(draws.next_s[1:] or draws.next_s or [0.0])
        starting_s, total_s = draws.waited_s - len(draws.next_s) * each_s, seen.step_s * seen.steps
        taken = min(starting_s / total_s, 0.95)
        if taken < 0.05:
            continue
        least = min(taken, START_S * loader.num_workers * draws.loops / total_s)
        yield Opportunity(
            f"keep the workers of {seen.name(loader, 'the DataLoader')} between epochs",
            f"{count(loader.num_workers, 'worker')} started and ended in "
            f"{count(draws.loops, 'loop')} over the loader: {share(taken)} of the time",
            Gain(amdahl(least, 2.0, 50.0).low, amdahl(taken, 2.0, 50.0).high),
            "DataLoader(…, persistent_workers=True)",
            "the workers keep their memory between epochs",
            part="data",
        )


def padding(seen: Situation) -> Iterator[Opportunity]:
    """Find batches of tokens that are at least one quarter padding."""
    inputs = (one for call in seen.calls for one in call.inputs)
    found = [one for one in map(padded, inputs) if one is not None]
    if not found or seen.computing < 0.2:
        return
    everywhere, behind = (sum(each) / len(found) for each in zip(*found, strict=True))
    if everywhere < 0.25:
        return
    # Padding to the longest row saves at least 60 % of the work on columns after it, because some
    # work is per row. Batches of similar lengths save at most the work on all padding.
    most = min(seen.computing * max(everywhere, behind), 0.95)
    low, high = advice.without(seen.computing * behind * 0.6), advice.without(most)
    together, is_long = "rows of similar length together", behind >= 0.01
    yield Opportunity(
        f"pad each batch to its own longest row, with {together}" if is_long else f"put {together}",
        f"{share(everywhere)} of the words are padding, {share(behind)} of all come after the "
        f"longest row of their batch; forward and backward: {share(seen.computing)} of the step",
        Gain(low, max(low, high)),
        "pad in collate_fn (pad_sequence, or DataCollatorWithPadding), and " * is_long
        + "sort into buckets by length",
        "batches of similar lengths change the order of samples",
    )


def many_lengths(seen: Situation) -> Iterator[Opportunity]:
    """Find a compiled model whose batches have many lengths: code for all lengths is slower."""
    groups = defaultdict[int, list[ObservedModelCall]](list)
    for call in seen.calls:
        groups[id(call.module)].append(call)
    calls = max(groups.values(), key=len, default=[])
    batches = [call.kwargs or call.args for call in calls]
    widths = [width for width in map(length_of, batches) if width]
    lengths, added = few_lengths(widths) if widths else ((), 0.0)
    if len({*widths}) <= len(lengths):
        return
    model = calls[0].module
    if Facts.read(model).compiled == "no" and not is_compiled(model):
        return
    seen.settle()
    checked = "your model must ignore padding: by attention_mask, and by labels of -100"
    with suppress(Exception):  # a length may be too long for the model
        if keeps_loss(model, calls[0].kwargs, lengths):
            checked = "the loss of a batch was the same with padding"
    drawn = next((one.loader for one in seen.observed.draws.values()), None)
    yield Opportunity(
        "pad batches to few lengths",
        f"{count(len({*widths}), 'length')} in {len(widths)} batches, "
        f"{min(widths)} to {max(widths)}; torch.compile makes code for each until it gives up, or "
        f"slower code for all lengths (dynamic=True); {count(len(lengths), 'length')} take as "
        f"many compilations, and {share(added)} of the words are then added padding",
        Gain(amdahl(seen.computing, 1 - added).low, amdahl(seen.computing, 1.5).low),
        f"DataLoader(…, collate_fn=bucketed(collate_fn, {lengths})), from speedkit_jupyter",
        checked,
        trial=other_loader(seen, drawn, LoaderSettings.of(drawn), lengths) if drawn else None,
    )


def padded(words: torch.Tensor) -> tuple[float, float] | None:
    """Return the share of padding in token ids, and the share of columns after the longest row.

    The most frequent value in the last column is padding. Return None without padding or token ids.
    """
    if words.dim() != 2 or words.is_floating_point() or words.shape[1] < 8:
        return None
    lowest, highest = int(words.min()), int(words.max())
    # Masks, segment numbers and constants are not tokens.
    if lowest == highest or (lowest >= 0 and highest <= 1):
        return None
    values, times = words[:, -1].unique(return_counts=True)
    is_word, width = words != values[times.argmax()], words.shape[1]
    lengths = width - is_word.flip(1).int().argmax(1)  # up to the last token of each row
    lengths[~is_word.any(1)] = 0
    if not (lengths < width).any():
        return None
    return 1 - float(lengths.sum()) / words.numel(), 1 - int(lengths.max()) / width
