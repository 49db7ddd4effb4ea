"""Tensors: values, memory, gradients, hooks; bit by bit."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.kinds.base import Copies, Kind

if TYPE_CHECKING:
    import torch

SLOTS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(slots=True, eq=False)
class Memory:
    """`saved` is None where only the `checksum` was taken; `home` is the memory it lies in."""

    saved: torch.Tensor | None
    checksum: Any
    home: torch.Tensor | None
    layout: tuple[Any, ...]
    size: int
    is_leaf: bool
    requires_grad: bool
    version: int | None


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

    def copy(self, found: torch.Tensor, copies: Copies) -> Memory:
        """A clone; or a checksum where it would be too large."""
        import torch

        plain = found.detach()
        size = plain.numel() * plain.element_size()
        saved = checksum = home = None
        if copies.fits(found, size):
            flat = _flat(plain)
            saved = flat.to("cpu", copy=True) if copies.off_device else flat.clone()
        else:
            checksum = _checksum(plain)
        if saved is not None and not copies.off_device and not found.is_inference():
            home = found.data  # else it would stay on the device as well
        return Memory(
            saved,
            checksum,
            home,
            _layout(found),
            found.untyped_storage().nbytes() if found.layout == torch.strided else 0,
            found.is_leaf,
            found.requires_grad,
            _version(found),
        )

    def glance(self, found: torch.Tensor) -> Memory:
        """Without the values."""
        settings = (found.is_leaf, found.requires_grad, _version(found))
        return Memory(None, None, None, _layout(found), 0, *settings)

    def same(self, found: torch.Tensor, memory: Memory) -> bool:
        """Bit by bit, where there is a copy."""
        if _layout(found) != memory.layout or found.requires_grad != memory.requires_grad:
            return False
        return found.is_leaf == memory.is_leaf and self.same_values(found, memory)

    def same_values(self, found: torch.Tensor, memory: Memory) -> bool:
        """Whatever its strides."""
        if memory.saved is None or found.is_meta:
            return True
        if found.shape != memory.layout[0] or found.dtype != memory.layout[1]:
            return False
        if memory.size and found.untyped_storage().nbytes() < memory.size:  # given back
            return False
        return _equal(_flat(found.detach()), memory.saved)

    def is_too_large(self, memory: Memory) -> bool:
        """Data of the user's, never the model's."""
        return memory.checksum is not None

    def same_checksum(self, found: torch.Tensor, memory: Memory) -> bool:
        """Of what was too large to copy."""
        return bool(_checksum(found.detach()) == memory.checksum)

    def put_back(self, found: torch.Tensor, memory: Memory) -> None:
        """Memory, values, and whether it wants a gradient."""
        import torch

        layout, saved, home = memory.layout, memory.saved, memory.home
        _grow(found if home is None else home, memory)
        with torch.inference_mode() if found.is_inference() else nullcontext():
            now = _layout(found)
            if home is not None and now != layout:
                found.data = home
            elif now[:4] != layout[:4] and saved is not None:
                found.data = _like(layout, saved)
            if saved is not None:
                _write(found, saved)
        if memory.is_leaf and not found.is_leaf:  # a graph was written into it
            found.detach_()
        if found.requires_grad != memory.requires_grad:
            found.requires_grad_(memory.requires_grad)


class Gradients(Kind):
    """Which tensor lies in `.grad`, and which hooks wait for it. Put back after all values."""

    def recognizes(self, cls: type) -> bool:
        """As tensors."""
        import torch

        return issubclass(cls, torch.Tensor)

    def children(self, found: torch.Tensor) -> Iterable[Any]:
        """The gradient and the dicts of hooks."""
        return [one for one in self.copy(found, Copies()) if one is not None]

    def copy(self, found: torch.Tensor, copies: Copies) -> tuple[Any, ...]:
        """The objects themselves."""
        gradient = found.grad if found.is_leaf else None  # others warn
        return (gradient, *(getattr(found, name, None) for name in SLOTS))

    def same(self, found: torch.Tensor, memory: tuple[Any, ...]) -> bool:
        """By identity."""
        return all(
            one is other for one, other in zip(self.copy(found, Copies()), memory, strict=True)
        )

    def put_back(self, found: torch.Tensor, memory: tuple[Any, ...]) -> None:
        """It fits the parameter by now."""
        gradient, *hooks = memory
        if found.is_leaf and found.grad is not gradient:
            found.grad = gradient
        for name, one in zip(SLOTS, hooks, strict=True):
            if getattr(found, name, None) is not one:
                setattr(found, name, one)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    import torch

    if tensor.layout != torch.strided:
        return tensor.shape, tensor.dtype, tensor.device, tensor.layout
    try:
        address = None if tensor.is_meta else (tensor.data_ptr(), tensor.untyped_storage().nbytes())
    except RuntimeError:  # a subclass without memory of its own
        address = None
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), address


def _grow(tensor: torch.Tensor, memory: Memory) -> None:
    """Its memory may have been given back meanwhile; what shares it is to share it again."""
    import torch

    if tensor.layout == torch.strided and tensor.untyped_storage().nbytes() < memory.size:
        tensor.untyped_storage().resize_(memory.size)


def _span(tensor: torch.Tensor) -> int:
    """How many elements of memory lie between its first and its last, both included."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((length - 1) * abs(stride) for length, stride in pairs)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Each element of memory once: where several indices mean one, it can't be written whole."""
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized or tensor.numel() < 2:
        return tensor
    if tensor.numel() <= (span := _span(tensor)):
        return tensor
    return tensor.as_strided((span,), (1,), tensor.storage_offset())


def _like(layout: tuple[Any, ...], saved: torch.Tensor) -> torch.Tensor:
    """New memory for it, as it lay, with the values of the copy."""
    import torch

    device = layout[2]
    if saved.layout != torch.strided or saved.is_quantized or saved.shape == layout[0]:
        return saved.to(device, copy=True)  # strides and all
    return saved.to(device, copy=True).as_strided(layout[0], layout[3])


def _write(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    import torch

    if tensor.layout == torch.strided:
        _flat(tensor).copy_(saved)
    elif (
        tensor.is_sparse
        and tensor._nnz() == saved._nnz()
        and tensor.is_coalesced() == (saved.is_coalesced())
    ):  # into its own memory, which `values()` gives out
        tensor._indices().copy_(saved._indices())
        tensor._values().copy_(saved._values())
    elif tensor.layout in _compressed() and [one.shape for one in _parts(tensor)] == [
        one.shape for one in _parts(saved)
    ]:
        for one, other in zip(_parts(tensor), _parts(saved), strict=True):
            one.copy_(other)
    else:
        tensor.data = saved.to(tensor.device, copy=True)


def _compressed() -> tuple[Any, ...]:
    import torch

    return torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a sparse one consists of."""
    import torch

    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit: what is not a number equals itself, and 0 differs from -0."""
    import torch

    with torch.inference_mode():
        other = other.to(one.device)
        if one.layout != other.layout or one.shape != other.shape:
            return False
        if one.layout != torch.strided:
            if one.is_sparse and one.is_coalesced() != other.is_coalesced():
                return False
            pairs = list(zip(_parts(one), _parts(other), strict=True))
            return all(a.shape == b.shape and _equal(a, b) for a, b in pairs)
        if one.is_quantized:
            return torch.equal(one, other)
        return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    import torch

    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not (tensor.is_floating_point() or tensor.dtype == torch.bool):
        return tensor
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.resolve_neg().view(whole[tensor.element_size()])


def _checksum(tensor: torch.Tensor) -> Any:
    """Sums of the memory as integers, in eight strands, so that most exchanges show."""
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return None
    with torch.inference_mode():
        bits = _bits(_flat(tensor)).reshape(-1)
        whole = len(bits) // 8 * 8
        strands = bits[:whole].view(-1, 8).sum(0, dtype=torch.int64).tolist()
        return [*strands, int(bits[whole:].sum(dtype=torch.int64))]
