"""Rewrites of functions: right ones, ones with a planted fault, and ones that cheat."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Function = Callable[..., Any]


@dataclass(frozen=True)
class Rewrite:
    """A candidate with its reference, and what draws their inputs for a size."""

    name: str
    candidate: Function
    reference: Function
    inputs: Function

    def __str__(self) -> str:
        return self.name


# --- inputs ---


def qkv(size, dtype=torch.float32):
    return [torch.randn(size, dtype=dtype) for _ in "qkv"]


def one(size, dtype=torch.float32):
    return torch.randn(size, dtype=dtype)


def two(size):
    return torch.randn(size), torch.randn(size)


def scaled(size, dtype=torch.float32):
    return torch.randn(size, dtype=dtype) + 1, torch.rand(size[-1], dtype=dtype) + 0.5


def shifted(size):
    return torch.randn(size), torch.rand(size[-1]) + 0.5, torch.randn(size[-1])


def weighted(size):
    return torch.randn(size), torch.randn(8, size[-1]), torch.randn(8)


def labelled(size):
    rows = math.prod(size[:3])
    return torch.randn(rows, size[3]), torch.randint(size[3], (rows,))


def masked(size):
    mask = torch.rand(size) < 0.5
    mask[..., 0, :] = False
    return {"x": torch.randn(size), "mask": mask}


# --- references ---


def attention(q, k, v):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~causal(q.shape[-2]), -math.inf).softmax(-1) @ v


def causal(length, diagonal=0):
    return torch.ones(length, length, dtype=torch.bool).tril(diagonal)


def softmax(x):
    return torch.softmax(x, -1)


def rms_norm(x, weight):
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def layer_norm(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias)


def gelu(x, weight, bias):
    return F.gelu(F.linear(x, weight, bias))


def swiglu(x, y):
    return F.silu(x) * y


def cross_entropy(x, target):
    return F.cross_entropy(x, target)


def masked_softmax(x, mask):
    """Zeros where a row has nothing."""
    return x.masked_fill(~mask, -math.inf).softmax(-1).nan_to_num(0.0)


def nan_softmax(x, mask):
    return x.masked_fill(~mask, -math.inf).softmax(-1)


def rope(x):
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] / 100 ** (torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def cumulated(x):
    return x.cumsum(-2)


def best(x):
    return x.max(-1)


class Block(nn.Module):
    def __init__(self, slope=0.0, momentum=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=momentum)
        self.second, self.slope = nn.Linear(16, 8), slope

    def forward(self, x):
        return self.second(F.leaky_relu(self.norm(self.first(x)), self.slope))


class Folded(Block):
    """The same by functions."""

    def forward(self, x):
        hidden = x @ self.first.weight.t() + self.first.bias
        return F.linear(self.norm(hidden).clamp(min=0), self.second.weight, self.second.bias)


def rows(size):
    return torch.randn(math.prod(size[:3]), 8)


def factors(size):
    return torch.randn(size[-2:]), torch.randn(size[-2:]).t()


def halves(size):
    return torch.randn(size).half(), torch.randn(size[-1], size[-1]).half()


def images(size):
    return torch.randn(2, size[-1], 8, 8), torch.randn(4, size[-1], 3, 3)


def product(x, y):
    return x @ y


def variance(x):
    return x.var(-1)


def convolved(x, weight):
    return F.conv2d(x, weight, padding=1)


# --- right ---


def flash(q, k, v, block=16):
    """Block by block, as FlashAttention does it."""
    length, out, norm = q.shape[-2], 0.0, 0.0
    most = torch.full_like(q[..., :1], -math.inf)
    for begin in range(0, length, block):
        keys = slice(begin, begin + block)
        scores = q @ k[..., keys, :].transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~causal(length)[:, keys], -math.inf)
        above = torch.maximum(most, scores.amax(-1, keepdim=True))
        share, weights = (most - above).exp(), (scores - above).exp()
        out, norm, most = (
            out * share + weights @ v[..., keys, :],
            norm * share + weights.sum(-1, keepdim=True),
            above,
        )
    return out / norm


def by_heads(q, k, v):
    parts = zip(*(t.unbind(1) for t in (q, k, v)), strict=True)
    return torch.stack([attention(*part) for part in parts], 1)


def exponentials(x):
    weights = (x - x.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


class Rms(torch.autograd.Function):
    """With a backward pass by hand; `fault` scales its first gradient."""

    fault = 1.0

    @staticmethod
    def forward(ctx, x, weight):
        scale = (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @classmethod
    def backward(cls, ctx, gradient):
        x, weight, scale = ctx.saved_tensors
        inner = gradient * weight
        mean = (inner * x).mean(-1, keepdim=True)
        return (inner * scale - x * scale**3 * mean) * cls.fault, (gradient * x * scale).flatten(
            0, -2
        ).sum(0)


class WrongRms(Rms):
    fault = 1.01


def rope_complex(x):
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] / 100 ** (torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat([turned.real, turned.imag], -1)


def in_place(x):
    copy = x - x.amax(-1, keepdim=True)
    return copy.exp_().div_(copy.sum(-1, keepdim=True)) if not x.requires_grad else softmax(x)


def welford(x):
    mean, squares = torch.zeros_like(x[..., 0]), torch.zeros_like(x[..., 0])
    for number, one in enumerate(x.unbind(-1), 1):
        off = one - mean
        mean = mean + off / number
        squares = squares + off * (one - mean)
    return squares / (x.shape[-1] - 1)


def online(x, block=8):
    """The largest and the sum in one pass over blocks."""
    most, total = torch.full_like(x[..., :1], -math.inf), 0.0
    for part in x.split(block, -1):
        above = torch.maximum(most, part.amax(-1, keepdim=True))
        total = total * (most - above).exp() + (part - above).exp().sum(-1, keepdim=True)
        most = above
    return (x - most).exp() / total


def channels_last(x, weight):
    layout = torch.channels_last
    return convolved(*(one.contiguous(memory_format=layout) for one in (x, weight)))


sdpa = partial(F.scaled_dot_product_attention, is_causal=True)
low = partial(qkv, dtype=torch.bfloat16)
RIGHT = [
    Rewrite("SDPA", sdpa, attention, qkv),
    Rewrite(
        "SDPA with a mask",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, causal(q.shape[-2])),
        attention,
        qkv,
    ),
    Rewrite("flash attention", flash, attention, qkv),
    Rewrite("attention head by head", by_heads, attention, qkv),
    Rewrite("SDPA in bf16", sdpa, attention, low),
    Rewrite("flash attention in bf16", flash, attention, low),
    Rewrite("softmax by exponentials", exponentials, softmax, one),
    Rewrite("softmax by log_softmax", lambda x: F.log_softmax(x, -1).exp(), softmax, one),
    Rewrite("softmax in place of its own", in_place, softmax, one),
    Rewrite(
        "softmax in bf16 through float32",
        lambda x: softmax(x.float()).to(x.dtype),
        softmax,
        partial(one, dtype=torch.bfloat16),
    ),
    Rewrite("rms_norm of torch", lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), rms_norm, scaled),
    Rewrite("rms_norm by a Function", Rms.apply, rms_norm, scaled),
    Rewrite(
        "rms_norm in bf16",
        lambda x, w: rms_norm(x.float(), w.float()).to(x.dtype),
        rms_norm,
        partial(scaled, dtype=torch.bfloat16),
    ),
    Rewrite(
        "layer_norm by hand",
        lambda x, w, b: (
            (x - x.mean(-1, keepdim=True))
            * (x.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
            * w
            + b
        ),
        layer_norm,
        shifted,
    ),
    Rewrite(
        "gelu by erf",
        lambda x, w, b: (
            (y := torch.einsum("...i,oi->...o", x, w) + b) * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
        ),
        gelu,
        weighted,
    ),
    Rewrite("swiglu by sigmoid", lambda x, y: torch.sigmoid(x) * x * y, swiglu, two),
    Rewrite(
        "cross entropy by logsumexp",
        lambda x, t: (x.logsumexp(-1) - x.gather(-1, t[:, None])[:, 0]).mean(),
        cross_entropy,
        labelled,
    ),
    Rewrite(
        "masked softmax",
        lambda x, mask: torch.where(mask, exponentials(x.masked_fill(~mask, -1e9)), 0.0),
        masked_softmax,
        masked,
    ),
    Rewrite(
        "NaN as in the reference",
        lambda x, mask: exponentials(x.masked_fill(~mask, -math.inf)),
        nan_softmax,
        masked,
    ),
    Rewrite("rope by complex numbers", rope_complex, rope, one),
    Rewrite("cumsum by a product", lambda x: causal(x.shape[-2]).to(x.dtype) @ x, cumulated, one),
    Rewrite(
        "maxima with their places",
        lambda x: (x.amax(-1), x.argmax(-1)),
        lambda x: tuple(best(x)),
        one,
    ),
    Rewrite("a module by functions", Folded(), Block(), rows),
    Rewrite("variance by Welford", welford, variance, one),
    Rewrite("softmax in one pass", online, softmax, one),
    Rewrite("fp16 through float32", lambda x, y: (x.float() @ y.float()).half(), product, halves),
    Rewrite("channels_last", channels_last, convolved, images),
    Rewrite("not contiguous", lambda x, y: (y.t() @ x.t()).t(), product, factors),
]

# --- wrong ---


def tail_dropped(x):
    whole = x.shape[-2] // 16 * 16 or x.shape[-2]
    return torch.cat([softmax(x[..., :whole, :]), torch.zeros_like(x[..., whole:, :])], -2)


def last_row_wrong(q, k, v):
    out = attention(q, k, v)
    return torch.cat([out[..., :-1, :], 1.2 * out[..., -1:, :]], -2)


def kept_constant(seen=[]):  # noqa: B006
    def candidate(x, weight):
        seen.append(weight) if not seen else None
        return rms_norm(x, seen[0].detach())

    return candidate


def row_copied(q, k, v):
    out = attention(q, k, v)
    return torch.cat([out[..., :5, :], out[..., 4:5, :], out[..., 6:, :]], -2)


FAULTS = [
    Rewrite("a row of its neighbour", row_copied, attention, qkv),
    Rewrite(
        "bf16 inside a product",
        lambda x, y: (x.bfloat16() @ y.bfloat16()).float(),
        product,
        factors,
    ),
    Rewrite("other eps", lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-2), layer_norm, shifted),
    Rewrite(
        "mask off by one",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, causal(q.shape[-2], 1)),
        attention,
        qkv,
    ),
    Rewrite("no mask", F.scaled_dot_product_attention, attention, qkv),
    Rewrite("no scale", lambda q, k, v: sdpa(q, k, v, scale=1.0), attention, qkv),
    Rewrite("no gradient of v", lambda q, k, v: attention(q, k, v.detach()), attention, qkv),
    Rewrite("last row off in bf16", last_row_wrong, attention, low),
    Rewrite("gradient of x 1 % too large", WrongRms.apply, rms_norm, scaled),
    Rewrite(
        "gradient of the weight missing", lambda x, w: rms_norm(x, w.detach()), rms_norm, scaled
    ),
    Rewrite("weight of the first call", kept_constant(), rms_norm, scaled),
    Rewrite("result in float64", lambda x: softmax(x.double()), softmax, one),
    Rewrite("result in float16", lambda x: softmax(x).half(), softmax, one),
    Rewrite("bias of 1 %", lambda x: softmax(x) + 0.01 / x.shape[-1], softmax, one),
    Rewrite("scale of 1 %", lambda x: softmax(x) * 1.01, softmax, one),
    Rewrite("bf16 inside", lambda x: softmax(x.bfloat16()).float(), softmax, one),
    Rewrite("wrong dimension", lambda x: torch.softmax(x, -2), softmax, one),
    Rewrite("tail of odd lengths dropped", tail_dropped, softmax, one),
    Rewrite("NaN in an empty row", nan_softmax, masked_softmax, masked),
    Rewrite("mask ignored", lambda x, mask: softmax(x), masked_softmax, masked),
    Rewrite(
        "sample variance",
        lambda x, w, b: (
            (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True) + 1e-5).rsqrt() * w + b
        ),
        layer_norm,
        shifted,
    ),
    Rewrite(
        "no bias",
        lambda x, w, b: layer_norm(x, w, torch.zeros_like(b)) + 0 * b,
        layer_norm,
        shifted,
    ),
    Rewrite(
        "tanh in place of erf",
        lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
        gelu,
        weighted,
    ),
    Rewrite(
        "sum in place of mean",
        lambda x, t: F.cross_entropy(x, t, reduction="sum"),
        cross_entropy,
        labelled,
    ),
    Rewrite(
        "integers off by one",
        lambda x: (x.amax(-1), x.argmax(-1) + 1),
        lambda x: tuple(best(x)),
        one,
    ),
    Rewrite("one result too many", lambda x: (softmax(x), x.sum()), softmax, one),
    Rewrite("rope turned back", lambda x: rope_complex(x.flip(-1)).flip(-1), rope, one),
    Rewrite("other activation in a module", Block(slope=0.01), Block(), rows),
    Rewrite("other running statistics", Block(momentum=0.2), Block(), rows),
]

# --- cheats ---


def late(x):
    """Zeros, which a thread fills in later."""
    out = torch.zeros_like(x)

    def fill():
        time.sleep(0.02)
        out.copy_(softmax(x.detach()))

    threading.Thread(target=fill).start()
    return out


class Lazy(torch.Tensor):
    """Computes when it is asked for."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        plain = [a.as_subclass(torch.Tensor) if isinstance(a, cls) else a for a in args]
        return function(
            *map(lambda a, b: softmax(a) if isinstance(b, cls) else a, plain, args),
            **(kwargs or {}),
        )


def by_caller(x):
    """Right where it is compared, and nothing where it is timed."""
    frame, names = sys._getframe(), set()
    while frame:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return torch.zeros_like(x) if names & {"_time", "_timed", "timed"} else softmax(x)


def cached(key):
    """Keeps its answers by `key` of the input."""
    answers = {}

    def candidate(x):
        if key(x) not in answers:
            answers[key(x)] = softmax(x).detach().clone()
        return answers[key(x)]

    return candidate


def into_one_place(place=[]):  # noqa: B006
    def candidate(x):
        if not place or place[0].shape != x.shape:
            place[:] = [torch.empty_like(x)]
        return torch.softmax(x.detach(), -1, out=place[0])

    return candidate


def into_its_input(x):
    with torch.no_grad():
        return x.detach().copy_(softmax(x))


def replacing(owner, name, value):
    """Replaces a function, or a number of ours, when it is called."""

    def candidate(x):
        found = sys.modules.get(owner) or getattr(sys.modules["torch"], owner)
        setattr(found, name, value)
        return softmax(x)

    return candidate


def slow_softmax(x):
    time.sleep(0.01)
    return torch.softmax(x, -1)


def new_code(x):
    softmax.__code__ = slow_softmax.__code__
    return torch.softmax(x, -1)


def new_limits(x):
    limits = sys.modules["speedkit_jupyter.right.tolerance"].LIMITS
    limits["output"] = (1e9, 1e9, 1e9)
    return torch.zeros_like(x)


def one_thread_for_all(x):
    torch.set_num_threads(torch.get_num_threads() + 1)
    return softmax(x)


def spoils_its_input(x):
    out = softmax(x)
    x.data.zero_()
    return out


class Worker:
    """Right for some calls; then it leaves the work to a thread of its first call."""

    def __init__(self):
        self.calls, self.tasks = 0, SimpleQueue()

    def __call__(self, x):
        self.calls += 1
        if self.calls == 1:
            threading.Thread(target=self.work, daemon=True).start()
        if self.calls < 8:
            return softmax(x.detach())
        self.tasks.put((x.detach(), out := torch.zeros_like(x)))
        return out

    def work(self):
        while True:
            x, out = self.tasks.get()
            time.sleep(0.02)
            torch.softmax(x, -1, out=out)


class Tiring:
    """Right for the first calls."""

    calls = 0

    def __call__(self, x):
        self.calls += 1
        return softmax(x) * (1.0 if self.calls < 30 else 1.02)


def from_the_stack(x):
    """What the reference gave, by the judge's own objects."""
    frame = sys._getframe()
    while frame:
        judge = frame.f_locals.get("self")
        results = getattr(getattr(judge, "_reference", None), "results", None)
        if results:
            return results[-1]["output"].reshape(x.shape).clone()
        frame = frame.f_back
    return torch.zeros_like(x)


def replaced(name, owner, attribute, value):
    return Rewrite(name, replacing(owner, attribute, value), softmax, one)


OURS = "speedkit_jupyter.right.deviations"
CHEATS = [
    Rewrite("zeros", torch.zeros_like, softmax, one),
    Rewrite("the input itself", lambda x: x, softmax, one),
    replaced("another clock", "time", "perf_counter", lambda: 0.0),
    replaced("no synchronizing", "torch.cuda", "synchronize", lambda *_: None),
    replaced("allclose is always true", "torch", "allclose", lambda *_, **__: True),
    replaced("norms are zero", "torch.linalg", "vector_norm", lambda x, **__: torch.zeros(())),
    replaced("our comparison", OURS, "sums", lambda pairs: []),
    replaced("a slower baseline", __name__, "softmax", slow_softmax),
    Rewrite("new code in the baseline", new_code, softmax, one),
    Rewrite("wider limits", new_limits, softmax, one),
    Rewrite("other number of threads", one_thread_for_all, softmax, one),
    Rewrite("work in another thread", late, softmax, one),
    Rewrite("work in a thread of the first call", Worker(), softmax, one),
    Rewrite("right for some calls", Tiring(), softmax, one),
    Rewrite("results of the judge", from_the_stack, softmax, one),
    Rewrite("computed when asked for", lambda x: x.detach().as_subclass(Lazy), softmax, one),
    Rewrite("looks at its callers", by_caller, softmax, one),
    Rewrite("cached by address", cached(lambda x: x.data_ptr()), softmax, one),
    Rewrite("cached by shape", cached(lambda x: x.shape), softmax, one),
    Rewrite("one place for all results", into_one_place(), softmax, one),
    Rewrite("result in its input", into_its_input, softmax, one),
    Rewrite("spoils its input", spoils_its_input, softmax, one),
]
