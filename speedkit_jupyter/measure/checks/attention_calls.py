"""Which calls of scaled_dot_product_attention a step makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.rounds.confinement import patched
from speedkit_jupyter.optimizations.facts.attention import Call

if TYPE_CHECKING:
    import torch

# Of more kinds of calls only the first are looked at.
MOST_KINDS = 16


@dataclass
class Seen:
    """One kind of call: the tensors of the first one, as its kernel gets them, and how many there
    were. `wanted` says which of query, key, value and mask get gradients.
    """

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    mask: torch.Tensor | None
    wanted: tuple[bool, bool, bool, bool]
    number: int = 1


@contextmanager
def noted(calls: dict[Call, Seen]) -> Iterator[None]:
    """Adds what this thread calls in the block.

    A mode sees torch's own function whoever holds it; what torch calls inside another one of its
    functions (MultiheadAttention) passes by the mode, but not by its name.
    """
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode

    original, inside = functional.scaled_dot_product_attention, 0

    class Noting(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, classes: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal inside
            if function is original:
                _note(calls, *args, **(kwargs or {}))
            inside += 1
            try:
                return function(*args, **(kwargs or {}))
            finally:
                inside -= 1

    def by_name(attention: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if inside:
                _note(calls, *args, **kwargs)
            return attention(*args, **kwargs)

        return call

    with patched(functional, "scaled_dot_product_attention", by_name), Noting():
        yield


def _note(
    calls: dict[Call, Seen],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    import torch

    given = (query, key, value, attn_mask)
    if (
        not all(tensor is None or _is_plain(tensor) for tensor in given)
        or query.device.type == "meta"
    ):
        return
    records = torch.is_grad_enabled()
    wanted = tuple(tensor is not None and records and tensor.requires_grad for tensor in given)
    lowered = _lowered(query)
    call = Call(
        tuple(query.shape),
        tuple(key.shape),
        tuple(value.shape),
        str(lowered).removeprefix("torch."),
        str(query.device),
        "" if attn_mask is None else _mask(attn_mask),
        bool(is_causal),
        float(dropout_p),
        None if scale is None else float(scale),
        bool(enable_gqa),
        any(wanted),
    )
    if call in calls:
        calls[call].number += 1
    elif len(calls) < MOST_KINDS:
        q, k, v = (tensor.detach().to(lowered) for tensor in (query, key, value))
        mask = None if attn_mask is None else attn_mask.detach()
        if mask is not None and mask.is_floating_point():
            mask = mask.to(lowered)
        calls[call] = Seen((q, k, v), mask, wanted)  # type: ignore[arg-type]


def _is_plain(tensor: Any) -> bool:
    """Without the ways of a subclass, and no nested one."""
    import torch

    ours = (torch.Tensor, torch.nn.Parameter)
    return type(tensor) in ours and not tensor.is_nested and tensor.layout is torch.strided


def _lowered(tensor: torch.Tensor) -> torch.dtype:
    """What autocast makes of it: attention is among what it lowers."""
    import torch

    kind = tensor.device.type
    lowers = torch.is_autocast_enabled(kind) and tensor.dtype is torch.float32
    return torch.get_autocast_dtype(kind) if lowers else tensor.dtype


def _mask(mask: torch.Tensor) -> str:
    sizes = "×".join(map(str, mask.shape))
    return f"{str(mask.dtype).removeprefix('torch.')} {sizes}"
