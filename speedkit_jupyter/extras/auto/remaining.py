"""The remaining time of a loop, estimated from its data loaders and progress bars."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

from torch.utils.data import DataLoader

from speedkit_jupyter.rounds import clock
from speedkit_jupyter.torchglue.confinement import patched
from speedkit_jupyter.torchglue.private import batches_given


class Remaining:
    """Estimate the remaining time of a loop from its data loaders and progress bars."""

    def __init__(self) -> None:
        self._loaders: dict[int, tuple[weakref.ref[Any], float, int]] = {}

    def watching(self) -> AbstractContextManager[None]:
        """Note in the block each iteration over a data loader that begins in this thread."""
        return patched(DataLoader, "__iter__", self._noting)

    def _noting(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def call(loader: Any) -> Any:
            batches = begin(loader)
            with suppress(TypeError):  # a loader without a length
                self._loaders[id(loader)] = (weakref.ref(batches), clock.now(), len(loader))
            return batches

        return call

    def seconds(self, elapsed_s: float) -> float:
        """Return the longest estimate of the remaining seconds, at least the `elapsed_s` so far."""
        tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
        runs: list[tuple[float, int, int]] = []  # seconds so far, number done, number in all
        for bar in [*getattr(tqdm, "_instances", ())]:
            runs.append((bar.format_dict["elapsed"], bar.n, bar.total or 0))
        for reference, begun_s, length in self._loaders.values():
            runs.append((clock.now() - begun_s, batches_given(reference()), length))
        remaining = (took_s * (total - done) / done for took_s, done, total in runs if done)
        return max([elapsed_s, *remaining])
