"""Batches that are on their way to the device when a loop gets them, so that it waits for none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def on_its_way(batch: Any, device: str) -> Any:
    """With its tensors on the device, or as it is where that is "". What computes with them there
    comes after the copy; the loop's own `.to(device)` finds them there.
    """
    import torch
    from torch.utils._pytree import tree_map

    if not device:
        return batch
    move = torch.Tensor.to
    return tree_map(
        lambda leaf: (
            move(leaf, device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf
        ),
        batch,
    )


class Copies:
    """An iterator's batches; all else that is asked of it is answered by the iterator."""

    def __init__(self, batches: Any, device: str) -> None:
        self._batches, self._device = batches, device

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return on_its_way(next(self._batches), self._device)

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__" or name in ("_batches", "_device"):
            raise AttributeError(name)
        return getattr(self._batches, name)
