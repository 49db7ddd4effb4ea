"""The calls of scaled_dot_product_attention that a step makes, and its kernels timed on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines import devices
from speedkit_jupyter.measure.checks import memory
from speedkit_jupyter.measure.results.statistics import (
    ERROR,
    bonferroni_share,
    least_rounds,
    paired_ratio,
)
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.confinement import patched
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

# Of more kinds of calls only the first are looked at.
MOST_KINDS = 16
# A block of calls lasts at least so long, as one of steps does; rounds beyond these tell no more.
BLOCK_S, MOST_ROUNDS = 0.002, 30
# The math kernel writes out so many copies of what each query gives each key.
COPIES = 4
# More than this is not written out on a processor, whose memory nobody can ask.
MOST_BYTES = 2**31


@dataclass
class Seen:
    """One kind of call: the tensors of the first one, as its kernel gets them, and how many there
    were. `wanted` says which of query, key, value and mask get gradients.
    """

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    mask: torch.Tensor | None
    wanted: tuple[bool, ...]
    number: int = 1


@contextmanager
def noted(calls: dict[Call, Seen]) -> Iterator[None]:
    """Add the calls of this thread in the block, by torch's name for the function."""
    from torch.nn import functional

    def make(attention: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            _note(calls, *args, **kwargs)
            return attention(*args, **kwargs)

        return call

    with patched(functional, "scaled_dot_product_attention", make):
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

    tensors, kind = (query, key, value, attn_mask), query.device.type
    given = [tensor for tensor in tensors if tensor is not None]
    plain = (torch.Tensor, torch.nn.Parameter)
    if kind == "meta" or any(type(t) not in plain or t.layout is not torch.strided for t in given):
        return
    lowers = torch.is_autocast_enabled(kind) and query.dtype is torch.float32
    dtype = torch.get_autocast_dtype(kind) if lowers else query.dtype
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors]
    mask = attn_mask
    call = Call(
        tuple(query.shape),
        tuple(key.shape),
        tuple(value.shape),
        _name(dtype),
        str(query.device),
        "" if mask is None else f"{_name(mask.dtype)} {'×'.join(map(str, mask.shape))}",
        bool(is_causal),
        float(dropout_p),
        None if scale is None else float(scale),
        bool(enable_gqa),
        any(wanted),
    )
    if call in calls:
        calls[call].number += 1
    elif len(calls) < MOST_KINDS:
        if mask is not None:
            mask = mask.detach().to(dtype if mask.is_floating_point() else mask.dtype)
        q, k, v = (tensor.detach().to(dtype) for tensor in (query, key, value))
        calls[call] = Seen((q, k, v), mask, tuple(wanted))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def measured(
    calls: Mapping[Call, Seen],
    seconds: float,
    engines: Sequence[str] = ("",),
    left_out: list[Call] | None = None,
) -> Iterator[Measured]:
    """Time each kind of call under each engine of float32 products, within about so many seconds.

    `left_out` gets those that there is no time for. Random numbers and switches are as before.
    """
    import torch

    if not hasattr(torch, "_fused_sdp_choice"):  # which kernel a choice takes
        return
    jobs = [
        (call, seen, engine)
        for engine in engines  # torch's own first: the last ones may be left out
        for call, seen in calls.items()
        if not engine or call.dtype == "float32"
    ]
    begun_s = clock.now()
    for number, (call, seen, engine) in enumerate(jobs):
        share_s = (seconds - (clock.now() - begun_s)) / (len(jobs) - number)
        device = seen.tensors[0].device
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.autocast(device.type, enabled=False),
            by_onednn() if engine else nullcontext(),
        ):
            try:
                row = _Job(call, seen).row(share_s, engine)
            except TimeoutError:
                row = None
                if left_out is not None:
                    left_out.append(call)
        if row is not None:
            yield row


class _Job:
    """One kind of call, ready to be run again."""

    def __init__(self, call: Call, seen: Seen) -> None:
        self._call, self._seen = call, seen
        self._device = seen.tensors[0].device
        self._options: dict[str, Any] = {
            "dropout_p": call.dropout, "is_causal": call.is_causal, "scale": call.scale
        }  # fmt: skip
        if call.enable_gqa:
            self._options["enable_gqa"] = True
        tensors = zip((*seen.tensors, seen.mask), seen.wanted, strict=True)
        self._inputs: list[Any] = [
            t if t is None else t.clone().requires_grad_(w) for t, w in tensors
        ]

    def row(self, seconds: float, engine: str) -> Measured | None:
        """Time the kernels; None where there is one only. Raises TimeoutError."""
        if seconds <= 0:
            raise TimeoutError
        own, begun_s = self._taken(AUTO), clock.now()
        able = {word: word for word in devices.attention_kernels(self._device)} | {own: AUTO}
        able = {kernel: word for kernel, word in able.items() if self._taken(word) == kernel}
        if len(able) < 2 or not self._runs(own, AUTO):
            return None
        if (clock.now() - begun_s) * 2 * least_rounds(1) > seconds:
            raise TimeoutError
        able = {kernel: word for kernel, word in able.items() if self._runs(kernel, word)}
        if len(able) < 2:
            return None
        times = self._times(able, seconds)
        share, timed = bonferroni_share(ERROR, len(times) - 1), []
        for kernel, its_s in times.items():
            ratio = paired_ratio(times[own], its_s, share)
            found = (1.0, 1.0, 1.0) if kernel == own else (ratio.median, ratio.low, ratio.high)
            timed.append(Timed(kernel, float(median(its_s)), *found))
        return Measured(self._call, self._seen.number, own, tuple(timed), engine)

    def _taken(self, word: str) -> str:
        with chosen(word):
            return taken(*self._inputs, **self._options)

    def _runs(self, kernel: str, word: str) -> bool:
        try:
            if has_room := kernel != "math" or self._has_room(self._inputs[0].element_size()):
                with chosen(word):
                    self._run()
        except RuntimeError:  # out of memory, say
            return False
        return has_room

    def _has_room(self, bytes_each: int) -> bool:
        """Whether the math kernel may write out what each query gives each key."""
        needed = COPIES * bytes_each * self._call.key[-2] * prod(self._call.query[:-1])
        on_cpu = self._device.type == "cpu"
        return needed < MOST_BYTES if on_cpu else memory.fits(needed, self._device)

    def _times(self, able: Mapping[str, str], seconds: float) -> dict[str, list[float]]:
        """Return the seconds of a call by kernel, round by round in shuffled order.

        Raises TimeoutError where rounds are too few to tell anything.
        """
        once_s = [self._block_s(word, 1) for word in able.values()]
        length = max(1, int(BLOCK_S / max(min(once_s), 1e-7)))
        round_s = (length + (length > 1)) * sum(once_s)
        rounds = min(int(seconds / max(round_s, 1e-7)), MOST_ROUNDS)
        if rounds < least_rounds(len(able) - 1):
            raise TimeoutError
        times: dict[str, list[float]] = {kernel: [] for kernel in able}
        order = random.Random(0)  # not the user's generator
        for _ in range(rounds):
            for kernel in order.sample(list(able), len(able)):
                times[kernel].append(self._block_s(able[kernel], length) / length)
        return times

    def _block_s(self, word: str, length: int) -> float:
        def block() -> None:
            for _ in range(length):
                self._run()

        with chosen(word):
            if length > 1:  # a first call after a switch doesn't matter for a long one
                self._run()
            return clock.timed(block, self._device)

    def _run(self) -> None:
        """Call it, with the backward pass where it trains."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        with torch.set_grad_enabled(self._call.trains):
            output = scaled_dot_product_attention(*self._inputs, **self._options)
            if self._call.trains:
                wanted = [t for t in self._inputs if t is not None and t.requires_grad]
                torch.autograd.grad(output, wanted, output.detach())
