"""Tensors: values, memory, gradients, hooks; bit by bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.checks.values import has_values, is_transformed
from speedkit_jupyter.measure.undo.handlers.base import Copies, StateHandler, attribute_dict
from speedkit_jupyter.measure.undo.handlers.memory import (
    equal,
    flat,
    laid_out,
    write,
)

if TYPE_CHECKING:
    import torch

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# No more nodes of an earlier graph are searched for the tensors behind it.
MOST_NODES = 50_000


@dataclass(slots=True, eq=False)
class Memory:
    """A copy of the values, unless they are `too_large`; `home` shares the tensor's memory."""

    saved: torch.Tensor | None
    too_large: bool
    home: torch.Tensor | None
    layout: tuple[Any, ...]
    is_leaf: bool
    requires_grad: bool
    version: int | None


class Tensors(StateHandler):
    """Values go into the same object and memory; strides, dtype and device return with them.

    They change while a plan is taken back and applied again, and recorded CUDA graphs know the
    addresses. Values are compared, not versions: fused optimizers, `.data` and `.numpy()` write
    without counting it.
    """

    bulky = True

    def recognizes(self, cls: type) -> bool:
        import torch

        return issubclass(cls, torch.Tensor)

    def copy(self, instance: torch.Tensor, copies: Copies) -> Memory:
        saved, too_large, home = None, False, None
        if not _consists_of_others(instance) and has_values(instance):
            once = flat(instance.detach())
            if copies.fits(instance, instance.numel() * instance.element_size()):
                saved = once.to("cpu", copy=True) if copies.off_device else once.clone()
            else:
                too_large = True
            # Main memory is meant to free the device, which `home` would not.
            if saved is not None and not copies.off_device and not instance.is_inference():
                home = instance.data
        return Memory(saved, too_large, home, *_settings(instance))

    def glance(self, instance: torch.Tensor) -> Memory:
        return Memory(None, False, None, *_settings(instance))

    def same(self, instance: torch.Tensor, memory: Memory) -> bool:
        now = _layout(instance), instance.is_leaf, instance.requires_grad
        before = memory.layout, memory.is_leaf, memory.requires_grad
        return now == before and self.same_values(instance, memory)

    def same_values(self, instance: torch.Tensor, memory: Memory) -> bool:
        if memory.saved is None:
            return True
        layout = _layout(instance)
        as_it_lay = len(layout) == 5 and layout == memory.layout  # then its memory is there, too
        if layout[:2] != memory.layout[:2] or not (as_it_lay or has_values(instance)):
            return False
        return equal(flat(instance.detach()), memory.saved)

    def is_too_large(self, memory: Memory) -> bool:
        return memory.too_large

    def put_back(self, instance: torch.Tensor, memory: Memory) -> None:
        import torch

        layout, saved, home = memory.layout, memory.saved, memory.home
        if home is not None and _has_storage(home):
            size = layout[4][1] if layout[4] is not None else 0
            if home.untyped_storage().nbytes() != size:  # resized by the step
                home.untyped_storage().resize_(size)
        with torch.inference_mode() if instance.is_inference() else nullcontext():
            now = _layout(instance)
            if home is not None and now != layout:
                instance.data = home
            elif now[:4] != layout[:4] and saved is not None:
                instance.data = laid_out(layout, saved)
            if saved is not None:
                write(instance, saved)
        if memory.is_leaf and not instance.is_leaf:  # a graph was written into it
            instance.detach_()
        if memory.is_leaf and instance.requires_grad != memory.requires_grad:
            instance.requires_grad_(memory.requires_grad)


class Gradients(StateHandler):
    """Which tensor lies in `.grad`, and which hooks wait for it. Put back after all values."""

    def recognizes(self, cls: type) -> bool:
        import torch

        return issubclass(cls, torch.Tensor)

    def children(self, instance: torch.Tensor) -> Iterable[Any]:
        yield from (part for part in self.copy(instance, Copies()) if part is not None)
        if _has_graph(instance):
            yield from _leaves(instance)

    def copy(self, instance: torch.Tensor, copies: Copies) -> tuple[Any, ...]:
        has_gradient = instance.is_leaf or instance.retains_grad  # others warn
        hooks = [getattr(instance, name, None) for name in HOOKS]
        return (instance.grad if has_gradient else None, *hooks)

    def put_back(self, instance: torch.Tensor, memory: tuple[Any, ...]) -> None:
        gradient, *hooks = memory
        if (instance.is_leaf or instance.retains_grad) and instance.grad is not gradient:
            instance.grad = gradient
        for name, hook in zip(HOOKS, hooks, strict=True):
            now = getattr(instance, name, None)
            if now is not hook:
                if isinstance(now, dict):
                    now.clear()  # an earlier graph still asks this dict
                setattr(instance, name, hook)


def is_trainable(tensor: torch.Tensor) -> bool:
    """Return whether backward passes write its gradient."""
    return tensor.is_leaf and tensor.requires_grad and not is_transformed(tensor)


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set how often tensors count as written: an earlier graph compares this with the value then.

    Only for tensors that hold their values of then again.
    """
    import torch

    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def _has_graph(tensor: torch.Tensor) -> bool:
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # a view of what was written to in a way that autograd does not allow
        return False


def _leaves(tensor: torch.Tensor) -> Iterator[Any]:
    """Yield the tensors behind an earlier graph: a backward pass of the step reaches them."""
    waiting, seen = [tensor.grad_fn], set[Any]()
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        if attribute_dict(node):  # one that the user wrote keeps what it likes
            yield node
        waiting += [parent for parent, _ in node.next_functions]


def _consists_of_others(tensor: torch.Tensor) -> bool:
    """Return whether its values are those of tensors in its attributes."""
    import torch

    if type(tensor) in {torch.Tensor, torch.nn.Parameter}:
        return False
    return bool(torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor))


def _has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a shape and strides describe where its values lie."""
    import torch

    return tensor.layout == torch.strided and not (tensor.is_nested or is_transformed(tensor))


def _settings(tensor: torch.Tensor) -> tuple[Any, ...]:
    version = None if tensor.is_inference() else tensor._version
    return _layout(tensor), tensor.is_leaf, tensor.requires_grad, version


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return shape, dtype, device, strides, and the address and size of the memory."""
    import torch

    parameters: Any = torch.nn.parameter
    if isinstance(tensor, parameters.UninitializedTensorMixin):
        tensor = tensor.data  # it will not say its shape
    if tensor.is_nested and tensor.layout == torch.strided:
        sizes = tensor._nested_tensor_size().tolist()
        return sizes, tensor.dtype, tensor.device, tensor.layout
    if not _has_storage(tensor):
        return tensor.shape, tensor.dtype, tensor.device, tensor.layout
    try:
        address = None if tensor.is_meta else (tensor.data_ptr(), tensor.untyped_storage().nbytes())
    except RuntimeError:  # a subclass without memory of its own
        address = None
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), address
