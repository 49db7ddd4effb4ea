"""Batches that are copied to a GPU from memory that it can't read by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

LEAST = 0.03


class PinMemory(Rule):
    """On CUDA: copies take a part of the step, and the loader's memory is not pinned."""

    name: ClassVar[str] = "pin_memory"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """For each loader."""
        copying = seen.share("host to device")
        if seen.device.type != "cuda" or copying < LEAST:
            return
        for loader in seen.loaders:
            if loader.pin_memory:
                continue
            yield Opportunity(
                self.name,
                f"pin the memory of {seen.name(loader, 'the DataLoader')}'s batches",
                f"host to device: {share(copying)} of the step, from memory that is not pinned",
                amdahl(copying, 1.3),
                "DataLoader(…, pin_memory=True), and x.to(device, non_blocking=True)",
                "main memory that can't be swapped out",
            )
