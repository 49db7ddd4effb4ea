"""What lies in a tensor's memory: each element once, read, written, compared as integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.checks.values.plain_tensors import has_values, is_plain
from speedkit_jupyter.support.storage import is_in_memory

if TYPE_CHECKING:
    import torch


def _span(tensor: torch.Tensor) -> int:
    """How many elements of memory lie between its first and its last, both included."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((length - 1) * abs(stride) for length, stride in pairs)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Each element of memory once: where several indices mean one, it can't be written whole."""

    if not is_plain(tensor) or tensor.numel() < 2:
        return tensor
    if tensor.numel() <= (span := _span(tensor)):
        return tensor
    return tensor.as_strided((span,), (1,), tensor.storage_offset())


def laid_out(layout: tuple[Any, ...], saved: torch.Tensor) -> torch.Tensor:
    """New memory for it, as it lay, with the values of the copy."""

    device = layout[2]
    if not is_plain(saved) or saved.shape == layout[0]:
        return saved.to(device, copy=True)  # strides and all
    return saved.to(device, copy=True).as_strided(layout[0], layout[3])


def write(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    """The copied values into the memory that it has."""
    import torch

    if tensor.layout == torch.strided and not tensor.is_nested:
        flat(tensor).copy_(saved)
    elif not is_in_memory(tensor):
        tensor.data = saved.to(tensor.device, copy=True)
    elif (
        tensor.is_sparse
        and tensor._nnz() == saved._nnz()
        and tensor.is_coalesced() == (saved.is_coalesced())
    ):  # into its own memory, which `values()` gives out
        tensor._indices().copy_(saved._indices())
        tensor._values().copy_(saved._values())
    elif tensor.layout in _compressed() and [part.shape for part in _parts(tensor)] == [
        part.shape for part in _parts(saved)
    ]:
        for part, source in zip(_parts(tensor), _parts(saved), strict=True):
            part.copy_(source)
    else:
        same_place = tensor.device == saved.device
        tensor.data = saved.clone() if same_place else saved.to(tensor.device)


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
    if tensor.is_nested:
        return list(tensor.unbind())
    return [tensor.to_dense()]


def equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit: what is not a number equals itself, and 0 differs from -0."""
    import torch

    with torch.inference_mode():
        other = other.to(tensor.device)
        if tensor.layout != other.layout or _sizes(tensor) != _sizes(other):
            return False
        if tensor.layout != torch.strided or tensor.is_nested:
            if tensor.is_sparse and tensor.is_coalesced() != other.is_coalesced():
                return False
            pairs = list(zip(_parts(tensor), _parts(other), strict=True))
            return all(a.shape == b.shape and equal(a, b) for a, b in pairs)
        if tensor.is_quantized:
            return torch.equal(tensor, other)
        return torch.equal(_bits(tensor), _bits(other))


def _sizes(tensor: torch.Tensor) -> Any:
    return [part.shape for part in tensor.unbind()] if tensor.is_nested else tensor.shape


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    import torch

    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not (tensor.is_floating_point() or tensor.dtype == torch.bool):
        return tensor
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.resolve_neg().view(whole[tensor.element_size()])


def checksum(tensor: torch.Tensor) -> Any:
    """Sums of the memory as integers, in eight strands, so that most exchanges show."""
    import torch

    if not is_plain(tensor) or not has_values(tensor):
        return None
    with torch.inference_mode():
        bits = _bits(flat(tensor)).reshape(-1)
        whole = len(bits) // 8 * 8
        strands = bits[:whole].view(-1, 8).sum(0, dtype=torch.int64).tolist()
        return [*strands, int(bits[whole:].sum(dtype=torch.int64))]


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage's own bytes, to be read and written."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
