"""Tensors laid out anew or moved in place: the same objects and values, with what follows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from speedkit_jupyter.catalog.properties.overrides import Optimizers, Property
from speedkit_jupyter.torchglue.modules import parameter_table
from speedkit_jupyter.torchglue.private import users_of_storage
from speedkit_jupyter.torchglue.storage import is_in_memory

Stride = tuple[int, ...]


class WeightLayout(NamedTuple):
    """How a weight lay, and the strides of those followers that lay otherwise, by their names."""

    stride: Stride
    odd: dict[str, Stride]


def weight_of(module: torch.nn.Module) -> torch.nn.Parameter:
    """Return the module's own weight."""
    weight = parameter_table(module)["weight"]
    assert weight is not None
    return weight


class WeightStrides(Property):
    """The strides of a module's weight, with its gradient and its optimizers' state after it.

    Modules are remembered: weights may be replaced, and `swap_tensors` refuses weak references.
    """

    def found(self, thing: torch.nn.Module, optimizers: Optimizers) -> WeightLayout:
        weight = weight_of(thing)
        lying = {name: t.stride() for name, t in _followers(weight, optimizers)}
        odd = {name: stride for name, stride in lying.items() if stride != weight.stride()}
        return WeightLayout(weight.stride(), odd)

    def put(self, thing: torch.nn.Module, override: Stride, optimizers: Optimizers) -> None:
        weight = weight_of(thing)
        restride(weight, override)
        for _, tensor in _followers(weight, optimizers):
            restride(tensor, override)

    def holds(self, thing: torch.nn.Module, override: Stride) -> bool:
        weight = parameter_table(thing).get("weight")
        return weight is not None and weight.dim() == len(override) and weight.stride() == override

    def put_back(
        self, thing: Any, original: WeightLayout, override: Any, optimizers: Optimizers
    ) -> None:
        if not self.holds(thing, override):
            return  # laid out by the user
        weight = weight_of(thing)
        restride(weight, original.stride)
        for name, tensor in _followers(weight, optimizers):
            restride(tensor, original.odd.get(name, original.stride))


# State at module level, on purpose: what lies on a module is known for the whole process.
LAYOUT = WeightStrides()


def restride(tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
    """Give `tensor` these strides; its object, values and dtype stay. No-op where it has them."""
    if tensor.stride() == stride:
        return
    laid_out = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    if is_in_memory(tensor):
        laid_out.copy_(tensor.detach())
    else:  # given back: an optimizer's state that is kept elsewhere for the moment
        laid_out.untyped_storage().resize_(tensor.untyped_storage().nbytes())
    tensor.data = laid_out


def owns_its_storage(tensor: torch.Tensor) -> bool:
    """Return whether the memory is this tensor's alone: no flat buffer, no other process's."""
    if tensor.device.type == "cpu" and tensor.is_shared():  # model.share_memory()
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def is_followed(tensor: torch.Tensor) -> bool:
    """Return whether other tensors see its values: a view, one of a `state_dict()`, an array."""
    return users_of_storage(tensor) > users_of_storage(torch.empty(1))


def companions(
    parameter: torch.Tensor, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the gradient and the optimizer state that lie with a parameter, each with a name; all
    but `step`, whose place has rules of its own.
    """
    held = parameter.is_leaf or parameter.retains_grad  # of others torch warns
    if held and parameter.grad is not None:
        yield "grad", parameter.grad
    for optimizer in optimizers:
        state: Any = optimizer.state.get(parameter)
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and name != "step":
                yield str(name), value


def _followers(weight: torch.Tensor, optimizers: Optimizers) -> Sequence[tuple[str, torch.Tensor]]:
    """Return the companions that must lie like their weight: fused optimizers walk all of them by
    one index, so a state in another layout silently belongs to other weights.
    """
    shape, strided, every = weight.shape, torch.strided, companions(weight, optimizers)
    return [(name, t) for name, t in every if t.shape == shape and t.layout == strided]


class TensorDevice(Property):
    """The device of a parameter or buffer, with its gradient and its optimizers' state after it."""

    def found(self, thing: torch.Tensor, optimizers: Optimizers) -> str:
        return str(thing.device)

    def put(self, thing: torch.Tensor, override: str, optimizers: Optimizers) -> None:
        for tensor in (thing, *(other for _, other in companions(thing, optimizers))):
            _move(tensor, override)

    def holds(self, thing: torch.Tensor, override: str) -> bool:
        return override in (str(thing.device), thing.device.type)

    def put_back(self, thing: Any, original: str, override: str, optimizers: Optimizers) -> None:
        if self.holds(thing, override) or str(thing.device) == original:
            self.put(thing, original, optimizers)


# State at module level, on purpose: where a tensor lies is known for the whole process.
PLACE = TensorDevice()


def _move(tensor: torch.Tensor, device: str) -> None:
    if is_in_memory(tensor):
        tensor.data = tensor.data.to(device)
        return
    moved = torch.empty_like(tensor.data, device=device)  # given back: there is nothing to move
    moved.untyped_storage().resize_(tensor.untyped_storage().nbytes())
    tensor.data = moved
