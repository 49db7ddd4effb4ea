"""Results of parts, put together as those of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support.exceptions import StepError

if TYPE_CHECKING:
    import torch


class _Rows(list[Any]):
    """One for each sample."""


def _is_of_samples(result: list[Any], samples: int) -> bool:
    """Whether a list has an element for each of them, and not several results of all of them."""
    import torch
    from torch.utils._pytree import tree_leaves

    tensors = [leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf) and leaf.ndim]
    are_batches = bool(tensors) and all(len(one) == samples for one in tensors)
    return len(result) == samples and not are_batches


class Joined:
    """Takes one part after another; `device` is where the whole lies, that of the parts without."""

    def __init__(self, length: int, device: str | torch.device | None = None) -> None:
        self.length, self._device = length, device
        self._whole: Any = None
        self._filled = 0

    def add(self, result: Any, samples: int) -> None:
        """The next part, of so many samples. Raises StepError for what can't be joined."""
        if self._filled == 0:
            self._whole = self._begun(result, samples)
        self._fill(self._whole, result, samples)
        self._filled += samples

    def result(self) -> Any:
        """Of all of them."""
        return list(self._whole) if isinstance(self._whole, _Rows) else self._whole

    def _begun(self, result: Any, samples: int) -> Any:
        import torch

        if isinstance(result, torch.Tensor):
            if not result.ndim or len(result) != samples:
                raise StepError(
                    f"a part of {samples} samples gave a tensor of shape {tuple(result.shape)}: "
                    "its first dimension is not the batch's"
                )
            device = result.device if self._device is None else self._device
            return result.new_empty((self.length, *result.shape[1:]), device=device)
        if isinstance(result, Mapping):
            return {key: self._begun(one, samples) for key, one in result.items()}
        if isinstance(result, tuple) and hasattr(result, "_fields"):
            return type(result)(*(self._begun(one, samples) for one in result))
        if isinstance(result, tuple):
            return tuple(self._begun(one, samples) for one in result)
        if isinstance(result, list):
            if _is_of_samples(result, samples):
                return _Rows()
            return [self._begun(one, samples) for one in result]
        if result is None:
            return None
        raise StepError(f"a part gave a {type(result).__name__}, which can't be joined")

    def _fill(self, whole: Any, result: Any, samples: int) -> None:
        import torch

        if isinstance(result, torch.Tensor):
            if result.shape[1:] != whole.shape[1:]:
                raise StepError(
                    f"parts gave tensors of different shapes, {tuple(whole.shape[1:])} and "
                    f"{tuple(result.shape[1:])}: take them one by one with .stream(…)"
                )
            whole[self._filled : self._filled + samples].copy_(result)
        elif isinstance(result, Mapping):
            for key, one in result.items():
                self._fill(whole[key], one, samples)
        elif isinstance(whole, _Rows):
            whole.extend(result)
        elif isinstance(result, list | tuple):
            for one, other in zip(whole, result, strict=True):
                self._fill(one, other, samples)
