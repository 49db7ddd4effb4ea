"""Batches of words that are padding for the most part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from speedkit_jupyter.advice.gain import Gain, amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

if TYPE_CHECKING:
    import torch

LEAST, LEAST_COMPUTING, SHORTEST = 0.25, 0.2, 8


class Padded(NamedTuple):
    """Of all places: those that are padding, and those behind the longest row."""

    all: float
    behind: float


class Padding(Rule):
    """Rows of one length, most of which end in one and the same word."""

    name: ClassVar[str] = "padding"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Of what the step's models are given."""
        found = [
            padded
            for call in seen.watched.of_models()
            for tensor in call.inputs
            if (padded := padding(tensor)) is not None
        ]
        if not found or seen.computing < LEAST_COMPUTING:
            return
        everywhere = sum(one.all for one in found) / len(found)
        behind = sum(one.behind for one in found) / len(found)
        if everywhere < LEAST:
            return
        computing = seen.computing
        # cutting what lies behind the longest row is the least, batches of like lengths the most;
        # what goes by rows and not by words does not get faster
        low = amdahl(computing * behind * 0.6, 1e9).low
        high = amdahl(min(computing * max(everywhere, behind), 0.95), 1e9).low
        yield Opportunity(
            self.name,
            "pad each batch to its own longest row, with rows of like length together",
            f"{share(everywhere)} of the words are padding, {share(behind)} of all lie behind the "
            f"longest row of their batch; forward and backward: {share(computing)} of the step",
            Gain(low, max(low, high)),
            "pad in collate_fn (pad_sequence, or DataCollatorWithPadding), and sort into buckets "
            "by length",
            "batches of like lengths come in another order",
            share=computing * max(everywhere, behind),
        )


def padding(words: torch.Tensor) -> Padded | None:
    """Of whole numbers, rows by words: what the last columns repeat; None for anything else."""
    if words.dim() != 2 or words.is_floating_point() or words.shape[1] < SHORTEST:
        return None
    lowest, highest = int(words.min()), int(words.max())
    # A mask and the numbers of two segments are no words, nor is one number everywhere.
    if lowest == highest or (lowest >= 0 and highest <= 1):
        return None
    values, times = words[:, -1].unique(return_counts=True)
    pad = values[times.argmax()]
    is_word = words != pad
    width = words.shape[1]
    # behind the last word of each row
    lengths = width - is_word.flip(1).int().argmax(1)
    lengths[~is_word.any(1)] = 0
    if not (lengths < width).any():
        return None
    return Padded(1 - float(lengths.sum()) / words.numel(), 1 - int(lengths.max()) / width)
