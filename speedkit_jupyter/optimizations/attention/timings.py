"""What each kernel of scaled_dot_product_attention took on the calls that a model's own step makes.

Measured in `measure/checks`, and kept beside the model for as long as it lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

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
