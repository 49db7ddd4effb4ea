"""torch's switches for the kernels of scaled_dot_product_attention, and which one a call gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from speedkit_jupyter.machines import flags
from speedkit_jupyter.optimizations.attention.timings import AUTO
from speedkit_jupyter.support.torch_private import (
    attention_kernel,
    attention_order,
    set_attention_order,
)

if TYPE_CHECKING:
    import torch

BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}
SWITCHES = ("sdp.flash", "sdp.efficient", "sdp.math", "sdp.cudnn", "sdp.priority_order")


def switches() -> Mapping[str, flags.Switch]:
    """Return which kernels may be taken, and in which order."""
    from torch.backends import cuda

    off = (False,)
    return {
        "sdp.flash": flags.Switch(cuda.flash_sdp_enabled, cuda.enable_flash_sdp, off),
        "sdp.efficient": flags.Switch(
            cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, off
        ),
        "sdp.math": flags.Switch(cuda.math_sdp_enabled, cuda.enable_math_sdp, off),
        "sdp.cudnn": flags.Switch(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, off),
        "sdp.priority_order": flags.Switch(
            attention_order, set_attention_order, ([0, 1, 2, 3, 4],)
        ),
    }


def choose(word: str) -> None:
    """Put this one first and the others in torch's own order from now on; beside `math` none."""
    from torch.backends import cuda

    only_math = word == "math"
    cuda.enable_flash_sdp(not only_math)
    cuda.enable_mem_efficient_sdp(not only_math)
    cuda.enable_cudnn_sdp(not only_math)
    cuda.enable_math_sdp(True)
    set_attention_order(order(word, attention_order()))


def order(word: str, now: Sequence[int]) -> list[int]:
    """Return the numbers of the kernels: the chosen one, and those after it."""
    from torch.nn.attention import SDPBackend

    first = int(getattr(SDPBackend, BACKENDS[word]))
    return [first, *(number for number in now if number != first)]


def in_order(word: str) -> tuple[str, ...]:
    """Return the same order in torch's words."""
    from torch.nn.attention import SDPBackend

    known = {int(getattr(SDPBackend, name)): name for name in BACKENDS.values()}
    every = order(word, attention_order())
    return tuple(known[number] for number in every if number in known)


@contextmanager
def chosen(word: str) -> Iterator[None]:
    """Make the choice for the block, without a plan; `auto` is what is in force."""
    if word == AUTO:
        yield
        return
    layer = flags.OVERRIDES.push(SWITCHES, lambda: choose(word))
    try:
        yield
    finally:
        flags.OVERRIDES.pop(layer)


def taken(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    """Return the word of the kernel that torch would take for such a call now."""
    from torch.nn.attention import SDPBackend

    number = attention_kernel(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    words = {int(getattr(SDPBackend, name)): word for word, name in BACKENDS.items()}
    return words.get(number, "another")
