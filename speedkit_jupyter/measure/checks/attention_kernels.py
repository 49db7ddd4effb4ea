"""The kernels of scaled_dot_product_attention, timed side by side on a step's own calls."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines import devices
from speedkit_jupyter.measure.checks import memory
from speedkit_jupyter.measure.checks.attention_calls import Seen
from speedkit_jupyter.measure.results.statistics import (
    ERROR,
    bonferroni_share,
    least_rounds,
    paired_ratio,
)
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.optimizations.facts.attention import (
    AUTO,
    Call,
    Measured,
    Timed,
    chosen,
    taken,
)
from speedkit_jupyter.optimizations.gemm import by_onednn

if TYPE_CHECKING:
    import torch

# A block of calls lasts at least so long, as one of steps does; rounds beyond these tell no more.
BLOCK_S, MOST_ROUNDS = 0.002, 30
# The math kernel writes out so many copies of what each query gives each key.
COPIES = 4
# More than this is not written out on a processor, whose memory nobody can ask.
MOST_BYTES = 2**31


def measured(
    calls: Mapping[Call, Seen],
    seconds: float,
    engines: Sequence[str] = ("",),
    left_out: list[Call] | None = None,
) -> Iterator[Measured]:
    """Each kind of call under each engine of float32 products, within about so many seconds.

    What there is no time for is `left_out`. Random numbers and switches are as before.
    """
    import torch

    if not hasattr(torch, "_fused_sdp_choice"):  # which kernel a choice takes
        return
    jobs = [
        (call, seen, engine)
        for engine in engines  # torch's own first: what is last may be left out
        for call, seen in calls.items()
        if not engine or call.dtype == "float32"
    ]
    begun_s = clock.now()
    for number, (call, seen, engine) in enumerate(jobs):
        share_s = (seconds - (clock.now() - begun_s)) / (len(jobs) - number)
        if share_s <= 0:
            if left_out is not None:
                left_out.append(call)
            continue
        gpus = [seen.tensors[0].device] if seen.tensors[0].is_cuda else []
        with (
            torch.random.fork_rng(gpus),
            torch.autocast(seen.tensors[0].device.type, enabled=False),
            by_onednn() if engine else nullcontext(),
        ):
            job = _Job(call, seen)
            row = job.row(share_s, engine)
        if row is not None:
            yield row
        elif job.is_short and left_out is not None:
            left_out.append(call)


class _Job:
    """One kind of call, ready to be run again; `is_short` says that there was no time for it."""

    def __init__(self, call: Call, seen: Seen) -> None:
        self._call, self._seen = call, seen
        self._device = seen.tensors[0].device
        self._inputs = self._fresh()
        self._gradient: torch.Tensor | None = None
        self.is_short = False

    def row(self, seconds: float, engine: str) -> Measured | None:
        """None where there is one kernel only, or no time."""
        own, begun_s = self._taken(AUTO), clock.now()
        others = [word for word in devices.attention_kernels(self._device) if word != own]
        others = [word for word in others if self._taken(word) == word]
        if not others or not self._takes(own, AUTO):
            return None
        self.is_short = (clock.now() - begun_s) * 2 * least_rounds(1) > seconds
        if self.is_short:
            return None
        able = {own: AUTO} | {word: word for word in others if self._takes(word, word)}
        times = self._times(able, seconds)
        self.is_short = len(able) > 1 and not times
        if len(times) < 2:
            return None
        errors = {kernel: self._error(able[kernel]) for kernel in times}
        number = len(times) - 1
        timed = [
            _timed(kernel, times[own], times[kernel], errors[kernel], number) for kernel in times
        ]
        return Measured(self._call, self._seen.number, own, tuple(timed), engine)

    def _takes(self, kernel: str, word: str) -> bool:
        """Whether the choice takes this kernel for such a call, and it runs."""
        if self._taken(word) != kernel or (kernel == "math" and not self._has_room(COPIES)):
            return False
        try:
            with chosen(word):
                self._run(self._inputs)
        except RuntimeError:  # out of memory, say
            return False
        return True

    def _taken(self, word: str) -> str:
        with chosen(word):
            return taken(*self._inputs, **self._options())

    def _has_room(self, copies: int, size: int = 0) -> bool:
        query, key = self._call.query, self._call.key
        entries = query[-2] * key[-2]
        for length in query[:-2]:
            entries *= length
        needed = copies * entries * (size or self._inputs[0].element_size())
        if self._device.type == "cpu":
            return needed < MOST_BYTES
        return memory.fits(needed, self._device)

    def _times(self, able: Mapping[str, str], seconds: float) -> dict[str, list[float]]:
        """Seconds of a call by kernel, round by round in shuffled order; none where rounds are too
        few to tell anything.
        """
        if len(able) < 2:
            return {}
        once_s = {kernel: self._block_s(word, 1) for kernel, word in able.items()}
        length = max(1, int(BLOCK_S / max(min(once_s.values()), 1e-7)))
        round_s = (length + (length > 1)) * sum(once_s.values())
        least = least_rounds(len(able) - 1)
        rounds = min(int(seconds / max(round_s, 1e-7)), MOST_ROUNDS)
        if rounds < least:
            return {}
        times: dict[str, list[float]] = {kernel: [] for kernel in able}
        order = random.Random(0)  # not the user's generator
        for _ in range(rounds):
            for kernel in order.sample(list(able), len(able)):
                times[kernel].append(self._block_s(able[kernel], length) / length)
        return times

    def _block_s(self, word: str, length: int) -> float:
        def block() -> None:
            for _ in range(length):
                self._run(self._inputs)

        with chosen(word):
            if length > 1:  # what is first after a switch is no matter for a long call
                self._run(self._inputs)
            return clock.timed(block, self._device)

    def _run(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """The output and, where it trains, the gradients."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        with torch.set_grad_enabled(self._call.trains):
            output = scaled_dot_product_attention(*inputs, **self._options())
            if not self._call.trains:
                return [output]
            gradient = self._gradient
            if gradient is None:
                gradient = self._gradient = torch.randn_like(output)
            wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
            return [output, *torch.autograd.grad(output, wanted, gradient.to(output.dtype))]

    def _error(self, word: str) -> float | None:
        """Against the math kernel in float64; none with dropout, whose masks differ."""
        import torch

        if self._call.dropout or not self._has_room(COPIES, 8):
            return None
        if not devices.has_float64(self._device):
            return None
        with suppress(RuntimeError):
            with chosen(word):
                outputs = self._run(self._inputs)
            with chosen("math"):
                exact = self._run(self._fresh(torch.float64))
            return max(_off(tensor, true) for tensor, true in zip(outputs, exact, strict=True))
        return None

    def _fresh(self, dtype: torch.dtype | None = None) -> list[Any]:
        """Leaves with the values of the step's own tensors, laid out like them."""
        seen = self._seen
        inputs = [*seen.tensors, seen.mask]
        leaves = []
        for tensor, wanted in zip(inputs, seen.wanted, strict=True):
            leaf = None if tensor is None else tensor.clone()
            if leaf is not None and dtype is not None and leaf.is_floating_point():
                leaf = leaf.to(dtype)
            leaves.append(leaf if leaf is None else leaf.requires_grad_(wanted))
        return leaves

    def _options(self) -> dict[str, Any]:
        call = self._call
        options = {"dropout_p": call.dropout, "is_causal": call.is_causal, "scale": call.scale}
        return options | ({"enable_gqa": True} if call.enable_gqa else {})


def _timed(
    kernel: str, own_s: Sequence[float], its_s: Sequence[float], error: float | None, number: int
) -> Timed:
    import numpy as np

    median_s = float(np.median(its_s))
    if own_s is its_s:
        return Timed(kernel, median_s, error=error)
    ratio = paired_ratio(own_s, its_s, bonferroni_share(ERROR, number))
    return Timed(kernel, median_s, ratio.median, ratio.low, ratio.high, error)


def _off(tensor: torch.Tensor, true: torch.Tensor) -> float:
    """Relative, by norm; of rows that a mask leaves empty only what both have."""
    wide, exact = tensor.detach().double(), true.detach().double()
    known = wide.isfinite() & exact.isfinite()
    size = exact[known].norm()
    return float((wide[known] - exact[known]).norm() / size) if size else 0.0
