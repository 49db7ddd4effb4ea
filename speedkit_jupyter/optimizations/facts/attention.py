"""The kernels of scaled_dot_product_attention: torch's switches for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from speedkit_jupyter.machines import flags
from speedkit_jupyter.support import torch_private

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
        "sdp.priority_order": flags.Switch(*torch_private.attention_order(), ([0, 1, 2, 3, 4],)),
    }


def choose(word: str) -> None:
    """Put this one first and the others in torch's own order from now on; beside `math` none."""
    from torch.backends import cuda

    only_math = word == "math"
    cuda.enable_flash_sdp(not only_math)
    cuda.enable_mem_efficient_sdp(not only_math)
    cuda.enable_cudnn_sdp(not only_math)
    cuda.enable_math_sdp(True)
    read, write = torch_private.attention_order()
    write(order(word, read()))


def order(word: str, now: Sequence[int]) -> list[int]:
    """Return the numbers of the kernels: the chosen one, and those after it."""
    from torch.nn.attention import SDPBackend

    first = int(getattr(SDPBackend, BACKENDS[word]))
    return [first, *(number for number in now if number != first)]


def in_order(word: str) -> tuple[str, ...]:
    """Return the same order in torch's words."""
    from torch.nn.attention import SDPBackend

    known = {int(getattr(SDPBackend, name)): name for name in BACKENDS.values()}
    every = order(word, torch_private.attention_order()[0]())
    return tuple(known[number] for number in every if number in known)
