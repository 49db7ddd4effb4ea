"""A model while a call of it is recorded: the same memory as other tensors, all put back after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.recomputing.outside_state import attributes_kept
from speedkit_jupyter.support import interrupts

if TYPE_CHECKING:
    import torch

    from speedkit_jupyter.machines.capture import Cuda


@contextmanager
def as_it_was(model: torch.nn.Module, device: Cuda) -> Iterator[None]:
    """After the block attributes of the modules are the same ones, and buffers and random numbers
    what they were, byte for byte.
    """
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    drawn = device.random_state()

    def put_back() -> None:
        for buffer, before in kept:
            buffer.data.copy_(before)  # which no graph of before is told of
        device.set_random_state(drawn)

    try:
        with attributes_kept(model):  # an LSTM has its weights in a list, made anew for others
            yield
    finally:
        interrupts.finished(put_back)


@contextmanager
def instead(model: torch.nn.Module, aliases: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """The same memory as other tensors in the modules, by the ids of the model's own."""
    places = [
        (holder, name, tensor)
        for part in model.modules()
        for holder in (part._parameters, part._buffers)
        for name, tensor in holder.items()
        if tensor is not None
    ]

    def put_back() -> None:
        for holder, name, tensor in places:
            holder[name] = tensor  # type: ignore[assignment]

    try:
        with interrupts.undisturbed():
            for holder, name, tensor in places:
                holder[name] = aliases[id(tensor)]  # type: ignore[assignment]
        yield
    finally:
        interrupts.finished(put_back)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """What is recorded belongs to these: autograd's nodes of the model's own tensors may be of
    another stream, which can't take part, and an optimizer's step would make autograd refuse to go
    through the graph once more.
    """
    import torch

    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor.data, requires_grad=tensor.requires_grad)
    return tensor.data


def by_id(ones: Sequence[Any], others: Sequence[Any]) -> dict[int, Any]:
    """Each of the others by the id of its counterpart."""
    return {id(key): other for key, other in zip(ones, others, strict=True)}
