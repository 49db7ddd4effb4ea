"""Tensors: values, memory, gradients, hooks; bit by bit."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.checks.values.plain_tensors import has_values, is_transformed
from speedkit_jupyter.measure.undo.kinds.base import Copies, Kind
from speedkit_jupyter.measure.undo.kinds.tensors.bits import (
    bytes_of,
    checksum,
    equal,
    flat,
    laid_out,
    write,
)
from speedkit_jupyter.support.storage import is_in_memory

if TYPE_CHECKING:
    import torch

SLOTS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(slots=True, eq=False)
class Memory:
    """`saved` is None where only the `checksum` was taken; `home` is the memory it lies in, and
    `storage` that memory's own object.

    `rest` are the bytes of a memory too small for its sizes: given back, wholly or in part.
    """

    saved: torch.Tensor | None
    checksum: Any
    rest: torch.Tensor | None
    home: torch.Tensor | None
    storage: torch.UntypedStorage | None
    layout: tuple[Any, ...]
    size: int
    is_leaf: bool
    requires_grad: bool
    version: int | None
    is_shared: bool = False

    def is_whole(self) -> bool:
        """Whether all that it held can be put back."""
        return self.saved is not None or self.rest is not None


class Tensors(Kind):
    """Values into the same object and the same memory; strides, dtype and device return with it.

    They change when a plan is taken back and applied again. State that does not lie like its
    parameter belongs to other weights in a fused kernel, and recorded CUDA graphs know addresses.
    Compared by value, since fused optimizers, `.data` and `.numpy()` write without counting it.
    """

    bulky = True

    def recognizes(self, cls: type) -> bool:
        """Parameters and other subclasses too."""
        import torch

        return issubclass(cls, torch.Tensor)

    def copy(self, instance: torch.Tensor, copies: Copies) -> Memory:
        """A clone; or a checksum where it would be too large."""

        detached = instance if is_transformed(instance) else instance.detach()
        size = instance.numel() * instance.element_size()
        saved = summed = rest = home = None
        if _consists_of_others(instance):
            pass  # what it consists of are tensors, which are copied themselves
        elif not has_values(instance):
            rest = _rest(instance)
        elif copies.fits(instance, size):
            once = flat(detached)
            saved = once.to("cpu", copy=True) if copies.off_device else once.clone()
        else:
            summed = checksum(detached)
        kept = rest is not None or (saved is not None and not copies.off_device)
        if kept and not instance.is_inference():
            home = instance.data  # else it would stay on the device as well
        has_memory = _has_memory(instance)
        return Memory(
            saved,
            summed,
            rest,
            home,
            instance.untyped_storage() if kept and has_memory else None,
            _layout(instance),
            instance.untyped_storage().nbytes() if has_memory else 0,
            instance.is_leaf,
            instance.requires_grad,
            _version(instance),
            _is_shared(instance),
        )

    def glance(self, instance: torch.Tensor) -> Memory:
        """Without the values."""
        settings = (instance.is_leaf, instance.requires_grad, _version(instance))
        return Memory(None, None, None, None, None, _layout(instance), 0, *settings)

    def same(self, instance: torch.Tensor, memory: Memory) -> bool:
        """Bit by bit, where there is a copy."""
        if _layout(instance) != memory.layout or instance.requires_grad != memory.requires_grad:
            return False
        return instance.is_leaf == memory.is_leaf and self.same_values(instance, memory)

    def same_values(self, instance: torch.Tensor, memory: Memory) -> bool:
        """Whatever its strides."""
        if memory.rest is not None:
            now = _rest(instance)
            return now is not None and equal(now, memory.rest)
        if memory.saved is None:
            return True
        layout = _layout(instance)
        as_it_lay = len(layout) == 5 and layout == memory.layout  # then its memory is there, too
        if layout[:2] != memory.layout[:2] or not (as_it_lay or has_values(instance)):
            return False
        return equal(flat(instance.detach()), memory.saved)

    def is_too_large(self, memory: Memory) -> bool:
        """Data of the user's, never the model's."""
        return memory.checksum is not None

    def same_checksum(self, instance: torch.Tensor, memory: Memory) -> bool:
        """Of what was too large to copy."""
        return bool(checksum(instance.detach()) == memory.checksum)

    def put_back(self, instance: torch.Tensor, memory: Memory) -> None:
        """Memory, values, and whether it wants a gradient."""
        import torch

        layout, saved, home = memory.layout, memory.saved, memory.home
        _resize(instance, memory)
        with torch.inference_mode() if instance.is_inference() else nullcontext():
            now = _layout(instance)
            if home is not None and now != layout:
                instance.data = home
            elif now[:4] != layout[:4] and saved is not None:
                instance.data = laid_out(layout, saved)
            if saved is not None:
                write(instance, saved)
            if memory.rest is not None:
                bytes_of(instance.untyped_storage()).copy_(memory.rest)
        if memory.is_leaf and not instance.is_leaf:  # a graph was written into it
            instance.detach_()
        # A graph can't be put back; as a leaf it would be another tensor than it was.
        if memory.is_leaf and instance.requires_grad != memory.requires_grad:
            instance.requires_grad_(memory.requires_grad)
        if _is_shared(instance) and not memory.is_shared:
            raise RuntimeError("it lies in memory of all processes now")


class Gradients(Kind):
    """Which tensor lies in `.grad`, and which hooks wait for it. Put back after all values."""

    def recognizes(self, cls: type) -> bool:
        """As tensors."""
        import torch

        return issubclass(cls, torch.Tensor)

    def children(self, instance: torch.Tensor) -> Iterable[Any]:
        """The gradient and the dicts of hooks."""
        return [part for part in self.copy(instance, Copies()) if not isinstance(part, bool | None)]

    def copy(self, instance: torch.Tensor, copies: Copies) -> tuple[Any, ...]:
        """The objects themselves; whether one that is computed keeps its gradient."""
        gradient = (
            instance.grad if instance.is_leaf or instance.retains_grad else None  # others warn
        )
        hooks = [getattr(instance, name, None) for name in SLOTS]
        return (gradient, instance.retains_grad and not instance.is_leaf, *hooks)

    def same(self, instance: torch.Tensor, memory: tuple[Any, ...]) -> bool:
        """By identity."""
        return all(
            part is saved for part, saved in zip(self.copy(instance, Copies()), memory, strict=True)
        )

    def put_back(self, instance: torch.Tensor, memory: tuple[Any, ...]) -> None:
        """It fits the parameter by now. Raises RuntimeError for what torch can't take back."""
        gradient, retains, *hooks = memory
        if (instance.is_leaf or instance.retains_grad) and instance.grad is not gradient:
            instance.grad = gradient
        for name, hook in zip(SLOTS, hooks, strict=True):
            now = getattr(instance, name, None)
            if now is not hook:
                if isinstance(now, dict):
                    now.clear()  # which a graph goes on asking
                setattr(instance, name, hook)
        if instance.retains_grad and not instance.is_leaf and not retains:
            raise RuntimeError("it retains its gradient from now on")


def is_trainable(tensor: torch.Tensor) -> bool:
    """Whether backward passes write its gradient: it counts how often it was written, too."""
    return tensor.is_leaf and tensor.requires_grad and not is_transformed(tensor)


def _consists_of_others(tensor: torch.Tensor) -> bool:
    import torch

    if type(tensor) in {torch.Tensor, torch.nn.Parameter}:
        return False
    return bool(torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor))


def _has_memory(tensor: torch.Tensor) -> bool:
    """Of one piece, which a shape and strides describe."""
    import torch

    pieces = _is_nested(tensor) or is_transformed(tensor)
    return tensor.layout == torch.strided and not pieces


def _is_nested(tensor: torch.Tensor) -> bool:
    import torch

    return tensor.is_nested and tensor.layout == torch.strided


def _is_shared(tensor: torch.Tensor) -> bool:

    if not _has_memory(tensor) or tensor.device.type != "cpu":
        return False
    try:
        return bool(tensor.untyped_storage().is_shared())
    except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
        return False


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    import torch

    parameters: Any = torch.nn.parameter
    if isinstance(tensor, parameters.UninitializedTensorMixin):
        tensor = tensor.data  # it will not say its shape
    if not _has_memory(tensor):
        sizes = tensor.shape if not _is_nested(tensor) else tensor._nested_tensor_size().tolist()
        return sizes, tensor.dtype, tensor.device, tensor.layout
    try:
        address = None if tensor.is_meta else (tensor.data_ptr(), tensor.untyped_storage().nbytes())
    except RuntimeError:  # a subclass without memory of its own
        address = None
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), address


def _resize(tensor: torch.Tensor, memory: Memory) -> None:
    """Its memory may have been given back meanwhile, or have grown; what shares it is to share it
    again. Where it is not known to be the same memory it may be another's, and does not shrink.
    """
    if not _has_memory(tensor):
        return
    storage = tensor.untyped_storage() if memory.storage is None else memory.storage
    now = storage.nbytes()
    if now < memory.size or (now > memory.size and memory.storage is not None):
        storage.resize_(memory.size)


def _rest(tensor: torch.Tensor) -> torch.Tensor | None:
    """What is left of a memory that does not hold all of the tensor's elements."""
    if not _has_memory(tensor) or tensor.is_meta or is_in_memory(tensor):
        return None
    return bytes_of(tensor.untyped_storage()).clone()
