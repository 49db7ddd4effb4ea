"""A tensor's memory: each element once, compared as integers, written in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.checks.values import is_plain

if TYPE_CHECKING:
    import torch


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with each element of memory once: an expanded tensor can't be written."""
    if not is_plain(tensor) or tensor.numel() < 2:
        return tensor
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((length - 1) * abs(stride) for length, stride in pairs)
    if tensor.numel() <= span:
        return tensor
    return tensor.as_strided((span,), (1,), tensor.storage_offset())


def laid_out(layout: tuple[Any, ...], saved: torch.Tensor) -> torch.Tensor:
    """Return new memory with the values of a copy, in the layout of the original."""
    new = saved.to(layout[2], copy=True)  # strides and all
    if not is_plain(saved) or saved.shape == layout[0]:
        return new
    return new.as_strided(layout[0], layout[3])


def write(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    """Write the values of a copy into the memory that the tensor has."""
    import torch

    if tensor.layout == torch.strided and not tensor.is_nested:
        flat(tensor).copy_(saved)
        return
    now, parts = _parts(tensor), _parts(saved)
    coalesced = tensor.layout != torch.sparse_coo or tensor.is_coalesced() == saved.is_coalesced()
    in_place = str(tensor.layout) != "torch._mkldnn" and not tensor.is_nested
    if in_place and coalesced and [p.shape for p in now] == [p.shape for p in parts]:
        for part, source in zip(now, parts, strict=True):  # which `values()` gives out
            part.copy_(source)
    else:
        tensor.data = saved.to(tensor.device, copy=True)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors that a sparse or nested one consists of."""
    import torch

    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return list(tensor.unbind()) if tensor.is_nested else [tensor.to_dense()]


def equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both hold the same bits: NaN equals itself, and 0 differs from -0."""
    import torch

    with torch.inference_mode():
        other = other.to(tensor.device)
        if tensor.layout != other.layout or tensor.is_nested != other.is_nested:
            return False
        if tensor.layout != torch.strided or tensor.is_nested:
            now, parts = _parts(tensor), _parts(other)
            return len(now) == len(parts) and all(map(equal, now, parts))
        if tensor.shape != other.shape:
            return False
        if tensor.is_quantized:
            return torch.equal(tensor, other)
        return torch.equal(_bits(tensor), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers."""
    import torch

    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not (tensor.is_floating_point() or tensor.dtype == torch.bool):
        return tensor
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.resolve_neg().view(whole[tensor.element_size()])
