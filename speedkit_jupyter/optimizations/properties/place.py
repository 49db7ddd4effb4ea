"""Tensors moved in place: the same object and values on another device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.properties.overrides import Optimizers, Property
from speedkit_jupyter.support.storage import is_in_memory

if TYPE_CHECKING:
    import torch


class Place(Property):
    """The device of a parameter or buffer, with its gradient and its optimizers' state after it."""

    def found(self, thing: torch.Tensor, optimizers: Optimizers) -> str:
        """Return its device."""
        return str(thing.device)

    def put(self, thing: torch.Tensor, override: str, optimizers: Optimizers) -> None:
        """Move it, and what goes with it."""
        for tensor in (thing, *_companions(thing, optimizers)):
            _move(tensor, override)

    def holds(self, thing: torch.Tensor, override: str) -> bool:
        """Whether it lies there still; a kind without a number is any device of it."""
        return override in (str(thing.device), thing.device.type)

    def put_back(
        self, thing: torch.Tensor, original: str, override: str, optimizers: Optimizers
    ) -> None:
        """Move it back, unless the user moved it; what was made meanwhile goes with it."""
        if self.holds(thing, override) or str(thing.device) == original:
            self.put(thing, original, optimizers)


# State at module level, on purpose: where a tensor lies is known for the whole process.
PLACE = Place()


def _move(tensor: torch.Tensor, device: str) -> None:
    import torch

    if is_in_memory(tensor):
        tensor.data = tensor.data.to(device)
        return
    moved = torch.empty_like(tensor.data, device=device)  # given back: there is nothing to move
    moved.untyped_storage().resize_(tensor.untyped_storage().nbytes())
    tensor.data = moved


def _companions(parameter: torch.Tensor, optimizers: Optimizers) -> Iterator[torch.Tensor]:
    """Yield its gradient, and the optimizer state that lies with it.

    All but `step`, whose place has rules that are the fused optimizer's business.
    """
    import torch

    if parameter.is_leaf and parameter.grad is not None:
        yield parameter.grad
    for optimizer in optimizers:
        state: Any = optimizer.state.get(parameter)
        for key, value in state.items() if isinstance(state, dict) else ():
            if key != "step" and isinstance(value, torch.Tensor):
                yield value
