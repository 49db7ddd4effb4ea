"""Tensors laid out anew in place: the same object, the same values, other strides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

from speedkit_jupyter.optimizations.properties.wishes import Optimizers, Property
from speedkit_jupyter.support.storage import is_in_memory

if TYPE_CHECKING:
    import torch

Stride = tuple[int, ...]


class Found(NamedTuple):
    """How a weight lay, and those of its followers that lay otherwise."""

    shape: tuple[int, ...]
    stride: Stride
    odd: MutableMapping[torch.Tensor, Stride]


class Layout(Property):
    """The strides of a weight, with its gradient and its optimizers' state after it."""

    def found(self, thing: torch.Tensor, optimizers: Optimizers) -> Found:
        """Its strides, and the odd ones' of what should lie like it."""
        from torch.utils.weak import WeakIdKeyDictionary

        odd: MutableMapping[torch.Tensor, Stride] = WeakIdKeyDictionary()
        for tensor in followers(thing, optimizers):
            if tensor.stride() != thing.stride():
                odd[tensor] = tensor.stride()
        return Found(tuple(thing.shape), thing.stride(), odd)

    def put(self, thing: torch.Tensor, wish: Stride, optimizers: Optimizers) -> None:
        """Lay it out, and whatever must lie like it."""
        for tensor in (thing, *followers(thing, optimizers)):
            restride(tensor, wish)

    def holds(self, thing: torch.Tensor, wish: Stride) -> bool:
        """Whether it lies so still."""
        return thing.dim() == len(wish) and thing.stride() == wish

    def put_back(
        self, thing: torch.Tensor, original: Found, wish: Stride, optimizers: Optimizers
    ) -> None:
        """As it lay; what was made meanwhile lies like its weight."""
        if tuple(thing.shape) != original.shape or not self.holds(thing, wish):
            return  # other values in another shape, or laid out by the user
        restride(thing, original.stride)
        for tensor in followers(thing, optimizers):
            restride(tensor, original.odd.get(tensor, original.stride))


# State at module level, on purpose: what lies on a tensor is known for the whole process.
LAYOUT = Layout()


def restride(tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
    """Give `tensor` these strides; its object, values and dtype stay. No-op where it has them."""
    import torch

    if tensor.stride() == stride:
        return
    laid_out = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    if is_in_memory(tensor):
        laid_out.copy_(tensor.detach())
    else:  # given back: an optimizer's state that is kept elsewhere for the moment
        laid_out.untyped_storage().resize_(tensor.untyped_storage().nbytes())
    tensor.data = laid_out


def owns_its_storage(tensor: torch.Tensor) -> bool:
    """Whether the memory is this tensor's alone: no flat buffer, and no other process's too."""
    if tensor.device.type == "cpu" and tensor.is_shared():  # model.share_memory()
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def is_followed(tensor: torch.Tensor) -> bool:
    """Whether other tensors see its values: a view, one of a `state_dict()`, an array."""
    import torch

    return _users(tensor) > _users(torch.empty(1))


def _users(tensor: torch.Tensor) -> int:
    """How many tensors refer to its memory, and some of torch's own; 0 where torch does not say."""
    import torch

    count = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else int(count(tensor.untyped_storage()._cdata))


def followers(
    parameter: torch.Tensor, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[torch.Tensor]:
    """The tensors that must lie like their parameter: its gradient and its optimizer state.

    Fused optimizers walk all of them by one index, so a state in another layout silently
    belongs to other weights.
    """
    import torch

    held = parameter.is_leaf or parameter.retains_grad  # of others torch warns
    if held and parameter.grad is not None and parameter.grad.layout == torch.strided:
        yield parameter.grad
    for optimizer in optimizers:
        state: Any = optimizer.state.get(parameter)
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                yield value
