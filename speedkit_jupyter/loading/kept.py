"""A data set whose samples stay in memory as they were first drawn."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.loading.attributes import MOST, plain

if TYPE_CHECKING:
    from torch.utils.data import Dataset


# Nobody can change these.
PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Kept:
    """Draws each sample of a data set once, decoded, and gives copies of it from then on.

    `device` is where its tensors are kept: "memory" is the CPU's. All else that is asked of it is
    answered by the data set.
    """

    def __init__(self, dataset: Dataset[Any], device: str = "memory") -> None:
        self.dataset, self.device = dataset, device
        self._samples: dict[Any, Any] = {}
        self._told: list[tuple[str, object]] | None = None
        self._drawing: frozenset[str] | None = None

    def begin(self) -> None:
        """An epoch: where a plain attribute of the data set was set since the last one (its epoch,
        a switch), samples are drawn anew. Not what drawing changes itself, such as a counter.
        """
        told, self._told = self._told, [*islice(plain(self.dataset), MOST)]
        own = self._drawing or frozenset()
        if told is None:
            return
        before, now = ([one for one in some if one[0] not in own] for some in (told, self._told))
        if before != now:
            self._samples.clear()

    def __getitem__(self, index: Any) -> Any:
        """The sample; drawn where it was not yet."""
        found = self._drawn(self._key(index))
        # On a device a batch is stacked of them, which copies; a copy of each would be a launch.
        return copied(found) if self.device == "memory" else found

    def __len__(self) -> int:
        """That of the data set."""
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__" or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def _key(self, index: Any) -> Any:
        return index

    def _drawn(self, key: Any) -> Any:
        if key not in self._samples:
            before = [*islice(plain(self.dataset), MOST)] if self._drawing is None else []
            sample = self.dataset[key]
            if self._drawing is None:
                now = [*islice(plain(self.dataset), MOST)]
                self._drawing = frozenset(name for name, _ in set(before) ^ set(now))
            self._samples[key] = sample if self.device == "memory" else self._moved(sample)
        return self._samples[key]

    def _moved(self, sample: Any) -> Any:
        import torch
        from torch.utils._pytree import tree_map

        move = torch.Tensor.to
        return tree_map(
            lambda leaf: move(leaf, self.device) if isinstance(leaf, torch.Tensor) else leaf, sample
        )


def copied(sample: Any) -> Any:
    """A copy that shares no memory. (`copy.deepcopy` takes 90 µs for a tensor, `clone` 2.)"""
    import numpy as np
    import torch

    kind = type(sample)
    if kind in PLAIN:
        return sample
    if kind is torch.Tensor:
        return sample.detach().clone().requires_grad_(sample.requires_grad)
    if kind is np.ndarray and sample.dtype != object:
        return sample.copy()
    if kind in (tuple, list):
        return kind(map(copied, sample))
    if kind is dict:
        return {key: copied(value) for key, value in sample.items()}
    return copy.deepcopy(sample)


class KeptSome(Kept):
    """For measuring: a few samples stand for all, so that none has to be decoded meanwhile."""

    def __init__(self, dataset: Dataset[Any], device: str, keys: Sequence[Any]) -> None:
        super().__init__(dataset, device)
        self._keys = list(keys)
        for key in self._keys:
            self._drawn(key)

    def _key(self, index: Any) -> Any:
        return index if index in self._samples else self._keys[hash(index) % len(self._keys)]
