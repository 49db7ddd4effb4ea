"""Handlers that restore tensors: values bit for bit, memory, gradients and hooks."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from speedkit_jupyter.state.handlers.base import CopyBudget, StateHandler
from speedkit_jupyter.torchglue import private as torch_private
from speedkit_jupyter.torchglue.storage import has_values, is_plain, plain

# A step's duration may depend on values of tensors below this size, such as counters and masks.
LARGE_BYTES = 1 << 20


class StorageCopy(NamedTuple):
    """A tensor's metadata, a copy of its values (`saved`), and an alias of its memory (`home`)."""

    saved: torch.Tensor | None
    home: torch.Tensor | None
    layout: tuple[Any, ...]
    is_leaf: bool
    requires_grad: bool
    version: int | None


class Tensors(StateHandler):
    """Handle tensors: restore values in the same object, with strides, dtype and device.

    If copies are on the device, the tensor keeps its address, because CUDA graphs may have recorded
    it. Values are compared, because fused optimizers, for example, don't raise version counters.
    """

    types = (torch.Tensor,)
    bulky = True

    def copy(self, instance: torch.Tensor, copies: CopyBudget) -> StorageCopy:
        saved = home = None
        readable = has_values(instance) and not torch_private.is_made_of_tensors(instance)
        if readable and copies.fits(instance, instance.numel() * instance.element_size()):
            once = _flat(instance.detach())
            saved = once.to("cpu", copy=True) if copies.off_device else once.clone()
            # With copies in main memory, an alias would keep the device's memory allocated.
            if not copies.off_device and not instance.is_inference():
                home = instance.data
        writes = None if instance.is_inference() else torch_private.version(instance)
        leaf, trains = instance.is_leaf, instance.requires_grad
        return StorageCopy(saved, home, _layout(instance), leaf, trains, writes)

    def same(self, instance: torch.Tensor, memory: StorageCopy) -> bool:
        return self._has_layout(instance, memory) and self.same_values(instance, memory)

    def takes_as_long(self, instance: torch.Tensor, memory: StorageCopy) -> bool:
        saved = memory.saved
        is_large = saved is not None and saved.is_floating_point() and saved.nbytes >= LARGE_BYTES
        return is_large and self._has_layout(instance, memory)

    def _has_layout(self, instance: torch.Tensor, memory: StorageCopy) -> bool:
        now = _layout(instance), instance.is_leaf, instance.requires_grad
        return now == memory[2:5]

    def same_values(self, instance: torch.Tensor, memory: StorageCopy) -> bool:
        if memory.saved is None:
            return True
        is_alike = _layout(instance)[:2] == memory.layout[:2]
        return is_alike and _equal(_flat(instance.detach()), memory.saved)

    def put_back(self, instance: torch.Tensor, memory: StorageCopy) -> None:
        layout, saved, home = memory.layout, memory.saved, memory.home
        if home is not None and len(layout) == 5:
            size = layout[4][1] if layout[4] is not None else 0
            if home.untyped_storage().nbytes() != size:  # the step resized the storage
                home.untyped_storage().resize_(size)
        with torch.inference_mode() if instance.is_inference() else nullcontext():
            now = _layout(instance)
            if home is not None and now != layout:
                instance.data = home
            elif now[:4] != layout[:4] and saved is not None:
                data = saved.to(layout[2], copy=True)  # keeps strides
                is_cut = is_plain(saved) and saved.shape != layout[0]
                instance.data = data.as_strided(layout[0], layout[3]) if is_cut else data
            if saved is not None:
                _write(instance, saved)
        if memory.is_leaf and not instance.is_leaf:  # an in-place operation added a graph
            instance.detach_()
        if memory.is_leaf and instance.requires_grad != memory.requires_grad:
            instance.requires_grad_(memory.requires_grad)
        if saved is not None and memory.version is not None:
            # An earlier autograd graph may still use these values; it checks their version.
            torch_private.set_versions([instance], [memory.version])


class Gradients(StateHandler):
    """Handle `.grad` and hooks of tensors. They are restored after all values."""

    types = (torch.Tensor,)

    def children(self, instance: torch.Tensor) -> Iterable[Any]:
        return [part for part in self.copy(instance, CopyBudget()) if part is not None]

    def copy(self, instance: torch.Tensor, copies: CopyBudget) -> tuple[Any, ...]:
        has_gradient = instance.is_leaf or instance.retains_grad  # torch warns for other tensors
        hooks = [getattr(instance, name, None) for name in torch_private.TENSOR_HOOKS]
        return (instance.grad if has_gradient else None, *hooks)

    def put_back(self, instance: torch.Tensor, memory: tuple[Any, ...]) -> None:
        gradient, *hooks = memory
        if (instance.is_leaf or instance.retains_grad) and instance.grad is not gradient:
            instance.grad = gradient
        for name, hook in zip(torch_private.TENSOR_HOOKS, hooks, strict=True):
            now = getattr(instance, name, None)
            if now is not hook:
                if isinstance(now, dict):
                    now.clear()  # an earlier graph may use this dict
                setattr(instance, name, hook)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return shape, dtype, device, strides, (address, bytes); if not strided, end with layout."""
    parameters: Any = torch.nn.parameter
    if isinstance(tensor, parameters.UninitializedTensorMixin):
        tensor = tensor.data  # a lazy wrapper without a shape
    if tensor.layout != torch.strided or tensor.is_nested or torch_private.is_transformed(tensor):
        shape = None if tensor.is_nested else tensor.shape
        return shape, tensor.dtype, tensor.device, tensor.layout
    try:
        address = None if tensor.is_meta else (tensor.data_ptr(), tensor.untyped_storage().nbytes())
    except RuntimeError:  # a subclass without memory
        address = None
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), address


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; if elements overlap, a flat view of its memory, which `copy_` accepts."""
    if not is_plain(tensor) or tensor.numel() < 2:
        return tensor
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((length - 1) * abs(stride) for length, stride in pairs)
    if tensor.numel() <= span:
        return tensor
    return tensor.as_strided((span,), (1,), tensor.storage_offset())


def _write(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    """Write copied values in place; COO and nested tensors get new `data`."""
    if tensor.layout == torch.strided and not tensor.is_nested:
        _flat(tensor).copy_(saved)
        return
    now, parts = _parts(tensor), _parts(saved)
    if parts and [part.shape for part in now] == [part.shape for part in parts]:
        for part, source in zip(now, parts, strict=True):  # other tensors may share this memory
            part.copy_(source)
    if not parts or tensor.layout is torch.sparse_coo:
        tensor.data = saved.to(tensor.device, copy=True)


def _equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are bitwise equal: NaN equals its copy, and 0 differs from -0."""
    with torch.inference_mode():
        other = other.to(tensor.device)
        if tensor.layout != other.layout or tensor.is_nested != other.is_nested:
            return False
        if parts := _parts(tensor):
            return all(map(_equal, parts, _parts(other)))
        now, before = plain(tensor), plain(other)
        if now is None or before is None or now.shape != before.shape:
            return False
        return torch.equal(_bits(now), _bits(before))


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a sparse tensor's values (and COO indices); empty for other layouts."""
    if tensor.layout is torch.sparse_coo:
        return torch_private.coo_parts(tensor)
    return [tensor.values()] if str(tensor.layout).startswith("torch.sparse") else []


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not (tensor.is_floating_point() or tensor.dtype == torch.bool):
        return tensor
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.resolve_neg().view(whole[tensor.element_size()])
