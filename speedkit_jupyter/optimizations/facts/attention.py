"""The kernels of scaled_dot_product_attention: torch's switches for them, and what each took on the
calls that a model's own step makes: measured in `measure/checks`, kept while the model lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines import flags
from speedkit_jupyter.support.torch_private import (
    attention_kernel,
    attention_order,
)
from speedkit_jupyter.support.wrappers import unwrapped

if TYPE_CHECKING:
    import torch

# What torch takes by itself.
AUTO = "auto"
# All calls of a step together have to gain so much; and a kernel's error may be so many times that
# of torch's own choice, or as small as this.
LEAST_GAIN, MOST_ERROR, NO_ERROR = 1.02, 4.0, 1e-6


@dataclass(frozen=True)
class Call:
    """One kind of call. Sizes are torch's: batch, heads, length, width; `dtype` is what the kernel
    gets, under the step's own autocast; `mask` is its dtype and sizes; `trains` says that gradients
    are recorded.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: str = "float32"
    device: str = "cpu"
    mask: str = ""
    is_causal: bool = False
    dropout: float = 0.0
    scale: float | None = None
    enable_gqa: bool = False
    trains: bool = False


@dataclass(frozen=True)
class Timed:
    """A kernel: the median of its seconds for one call, with its backward pass where it trains, and
    torch's own choice's time over it, with the interval; `error` is the largest relative one of
    output and gradients against the math kernel in float64, None where none can be told.
    """

    kernel: str
    seconds: float
    speedup: float = 1.0
    low: float = 1.0
    high: float = 1.0
    error: float | None = None


@dataclass(frozen=True)
class Measured:
    """One kind of call, so many `calls` a step, and the kernels that take it; `own` is torch's
    choice. `engine` multiplies float32 matrices meanwhile, empty for torch's own.
    """

    call: Call
    calls: int
    own: str
    kernels: tuple[Timed, ...]
    engine: str = ""

    def timed(self, kernel: str) -> Timed:
        """Return that kernel's; where it does not take such a call, that of torch's own choice."""
        by_kernel = {timed.kernel: timed for timed in self.kernels}
        return by_kernel.get(kernel, by_kernel[self.own])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def keep(model: torch.nn.Module, rows: Sequence[Measured]) -> None:
    """Keep the rows beside the model, in place of what was kept before."""
    inner = unwrapped(model)
    if id(inner) not in _KEPT:
        weakref.finalize(inner, _KEPT.pop, id(inner), None)
    _KEPT[id(inner)] = tuple(rows)


def kept(model: torch.nn.Module) -> tuple[Measured, ...]:
    """Return what was measured for it."""
    return _KEPT.get(id(unwrapped(model)), ())


def speedups(rows: Iterable[Measured], kernel: str) -> dict[tuple[str, str], float]:
    """Return torch's own time for all calls of a step over this kernel's, by dtype and engine."""
    return {which: _speedup(group, kernel) for which, group in _groups(rows).items()}


def ahead(rows: Sequence[Measured]) -> list[str]:
    """Return the kernels that are proven faster for some call and gain in all, in one dtype and
    under one engine, the best first; none that is far less exact.
    """
    names = dict.fromkeys(timed.kernel for row in rows for timed in row.kernels)
    gains = {name: max(_gains(rows, name), default=0.0) for name in names}
    able = [
        name
        for name in names
        if gains[name] >= LEAST_GAIN
        and not any(_is_far_off(row.timed(name), row.timed(row.own)) for row in rows)
    ]
    return sorted(able, key=lambda name: -gains[name])


def _groups(rows: Iterable[Measured]) -> dict[tuple[str, str], list[Measured]]:
    groups: dict[tuple[str, str], list[Measured]] = {}
    for row in rows:
        groups.setdefault((row.call.dtype, row.engine), []).append(row)
    return groups


def _speedup(group: Sequence[Measured], kernel: str) -> float:
    """Return it by the ratios of the rounds: seconds would mix quiet and busy ones."""
    own_s = [row.calls * row.timed(row.own).seconds for row in group]
    speedups = [row.timed(kernel).speedup for row in group]
    return sum(own_s) / sum(s / times for s, times in zip(own_s, speedups, strict=True))


def _gains(rows: Sequence[Measured], kernel: str) -> list[float]:
    """Return the gains of groups where one is proven."""
    groups = _groups(rows).values()
    proven = [group for group in groups if any(row.timed(kernel).low > 1 for row in group)]
    return [_speedup(group, kernel) for group in proven]


def _is_far_off(timed: Timed, own: Timed) -> bool:
    known = timed.error is not None and own.error is not None
    return known and timed.error > max(MOST_ERROR * own.error, NO_ERROR)  # type: ignore[operator]


# State at module level, on purpose: what was measured belongs to the model, which carries nothing
# of ours. By the model's id.
_KEPT: dict[int, tuple[Measured, ...]] = {}


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
        "sdp.priority_order": flags.Switch(*attention_order(), ([0, 1, 2, 3, 4],)),
    }


def choose(word: str) -> None:
    """Put this one first and the others in torch's own order from now on; beside `math` none."""
    from torch.backends import cuda

    only_math = word == "math"
    cuda.enable_flash_sdp(not only_math)
    cuda.enable_mem_efficient_sdp(not only_math)
    cuda.enable_cudnn_sdp(not only_math)
    cuda.enable_math_sdp(True)
    read, write = attention_order()
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
    every = order(word, attention_order()[0]())
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
