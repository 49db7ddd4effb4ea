"""Rewrites of functions: right rewrites, rewrites with a planted fault, and cheats."""

import itertools
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
    """A candidate, its reference, and a function that draws their inputs for a size."""

    name: str
    candidate: Function
    reference: Function
    inputs: Function

    def __str__(self) -> str:
        return self.name


# --- inputs ---


def one(size, dtype=torch.float32):
    return torch.randn(size, dtype=dtype)


def wide(size):
    return torch.randn(*size[:3], 512)


def qkv(size, dtype=torch.float32):
    return [one(size, dtype) for _ in "qkv"]


def scaled(size, dtype=torch.float32):
    return torch.randn(size, dtype=dtype) + 1, torch.rand(size[-1], dtype=dtype) + 0.5


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


def masked_softmax(x, mask):
    """Return the softmax over visible entries, or zeros in rows without visible entries."""
    return x.masked_fill(~mask, -math.inf).softmax(-1).nan_to_num(0.0)


def nan_softmax(x, mask):
    return x.masked_fill(~mask, -math.inf).softmax(-1)


def rope(x):
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] / 100 ** (torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Block(nn.Module):
    def __init__(self, slope=0.0, momentum=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=momentum)
        self.second, self.slope = nn.Linear(16, 8), slope

    def forward(self, x):
        return self.second(F.leaky_relu(self.norm(self.first(x)), self.slope))


class Folded(Block):
    def forward(self, x):
        hidden = x @ self.first.weight.t() + self.first.bias
        return F.linear(self.norm(hidden).clamp(min=0), self.second.weight, self.second.bias)


convolved = partial(F.conv2d, padding=1)


# --- right ---


def flash(q, k, v, block=16):
    """Return attention, computed block by block like FlashAttention."""
    length, out, norm = q.shape[-2], 0.0, 0.0
    most = torch.full_like(q[..., :1], -math.inf)
    for begin in range(0, length, block):
        keys = slice(begin, begin + block)
        scores = q @ k[..., keys, :].transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~causal(length)[:, keys], -math.inf)
        above = torch.maximum(most, scores.amax(-1, keepdim=True))
        share, weights = (most - above).exp(), (scores - above).exp()
        out = out * share + weights @ v[..., keys, :]
        norm, most = norm * share + weights.sum(-1, keepdim=True), above
    return out / norm


def by_heads(q, k, v):
    parts = zip(*(t.unbind(1) for t in (q, k, v)), strict=True)
    return torch.stack([attention(*part) for part in parts], 1)


def exponentials(x):
    weights = (x - x.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


class Rms(torch.autograd.Function):
    """RMS norm with its own backward pass; `fault` scales the gradient of x."""

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
        of_weight = (gradient * x * scale).flatten(0, -2).sum(0)
        return (inner * scale - x * scale**3 * mean) * cls.fault, of_weight


class WrongRms(Rms):
    fault = 1.01


def rope_complex(x):
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] / 100 ** (torch.arange(half) / half)
    turn = torch.polar(torch.ones_like(angle), angle)
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
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


def normalized(x, weight, bias, correction):
    variance = x.var(-1, correction=correction, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) * (variance + 1e-5).rsqrt() * weight + bias


def online(x, block=8):
    """Return the softmax, whose maximum and sum come from one pass over blocks."""
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


# Each row has a reference, a function that draws its inputs, right rewrites, and wrong rewrites.
FUNCTIONS: list[tuple[Function, Function, dict[str, Function], dict[str, Function]]] = [
    (attention, qkv, {
        "SDPA": sdpa,
        "SDPA with a mask": lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, causal(q.shape[-2])),
        "flash attention": flash,
        "attention head by head": by_heads,
    }, {
        "a row of its neighbour": row_copied,
        "mask off by one": lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, causal(q.shape[-2], 1)),
        "no mask": F.scaled_dot_product_attention,
        "no scale": partial(sdpa, scale=1.0),
        "no gradient of v": lambda q, k, v: attention(q, k, v.detach()),
    }),
    (attention, partial(qkv, dtype=torch.bfloat16),
     {"SDPA in bf16": sdpa, "flash attention in bf16": flash},
     {"last row off in bf16": last_row_wrong}),
    (softmax, one, {
        "softmax by exponentials": exponentials,
        "softmax by log_softmax": lambda x: F.log_softmax(x, -1).exp(),
        "softmax in place of its own": in_place,
        "softmax in one pass": online,
    }, {
        "result in float64": lambda x: softmax(x.double()),
        "result in float16": lambda x: softmax(x).half(),
        "bias of 1 %": lambda x: softmax(x) + 0.01 / x.shape[-1],
        "scale of 1 %": lambda x: softmax(x) * 1.01,
        "bf16 inside": lambda x: softmax(x.bfloat16()).float(),
        "wrong dimension": lambda x: torch.softmax(x, -2),
        "tail of odd lengths dropped": tail_dropped,
        "one result too many": lambda x: (softmax(x), x.sum()),
    }),
    (softmax, partial(one, dtype=torch.bfloat16),
     {"softmax in bf16 through float32": lambda x: softmax(x.float()).to(x.dtype)}, {}),
    (softmax, wide, {"softmax of long rows": exponentials},
     {"twice the gradient of long rows": lambda x: 2 * softmax(x) - softmax(x).detach()}),
    (rms_norm, scaled, {
        "rms_norm of torch": lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
        "rms_norm by a Function": Rms.apply,
    }, {
        "gradient of x 1 % too large": WrongRms.apply,
        "gradient of the weight missing": lambda x, w: rms_norm(x, w.detach()),
        "weight of the first call": kept_constant(),
    }),
    (rms_norm, partial(scaled, dtype=torch.bfloat16),
     {"rms_norm in bf16": lambda x, w: rms_norm(x.float(), w.float()).to(x.dtype)}, {}),
    (layer_norm, lambda size: (one(size), torch.rand(size[-1]) + 0.5, torch.randn(size[-1])),
     {"layer_norm by hand": partial(normalized, correction=0)}, {
        "other eps": lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-2),
        "sample variance": partial(normalized, correction=1),
        "no bias": lambda x, w, b: layer_norm(x, w, torch.zeros_like(b)) + 0 * b,
    }),
    (gelu, lambda size: (one(size), torch.randn(8, size[-1]), torch.randn(8)), {
        "gelu by erf": lambda x, w, b: (
            (y := torch.einsum("...i,oi->...o", x, w) + b) * (1 + torch.erf(y / 2**0.5)) / 2),
    }, {"tanh in place of erf": lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh")}),
    (lambda x, y: F.silu(x) * y, lambda size: (one(size), one(size)),
     {"swiglu by sigmoid": lambda x, y: torch.sigmoid(x) * x * y}, {}),
    (F.cross_entropy, labelled, {
        "cross entropy by logsumexp": lambda x, t: (
            x.logsumexp(-1) - x.gather(-1, t[:, None])[:, 0]).mean(),
    }, {"sum in place of mean": partial(F.cross_entropy, reduction="sum")}),
    (masked_softmax, masked, {
        "masked softmax": lambda x, mask: torch.where(
            mask, exponentials(x.masked_fill(~mask, -1e9)), 0.0),
    }, {"NaN in an empty row": nan_softmax, "mask ignored": lambda x, mask: softmax(x)}),
    (nan_softmax, masked, {
        "NaN as in the reference": lambda x, mask: exponentials(x.masked_fill(~mask, -math.inf)),
    }, {}),
    (rope, one, {"rope by complex numbers": rope_complex},
     {"rope turned back": lambda x: rope_complex(x.flip(-1)).flip(-1)}),
    (lambda x: x.cumsum(-2), one,
     {"cumsum by a product": lambda x: causal(x.shape[-2]).to(x.dtype) @ x}, {}),
    # The inputs are distinct numbers, because max and amax have different gradients for ties.
    (lambda x: tuple(x.max(-1)), lambda size: torch.randperm(math.prod(size)).view(size) / 99.0,
     {"maxima with their places": lambda x: (x.amax(-1), x.argmax(-1))},
     {"integers off by one": lambda x: (x.amax(-1), x.argmax(-1) + 1)}),
    (Block(), lambda size: torch.randn(math.prod(size[:3]), 8), {"a module by functions": Folded()},
     {"other activation in a module": Block(slope=0.01),
      "other running statistics": Block(momentum=0.2)}),
    (lambda x: x.var(-1), one, {"variance by Welford": welford}, {}),
    (torch.matmul, lambda size: (one(size).half(), torch.randn(size[-1], size[-1]).half()),
     {"fp16 through float32": lambda x, y: (x.float() @ y.float()).half()}, {}),
    (convolved, lambda size: (torch.randn(2, size[-1], 8, 8), torch.randn(4, size[-1], 3, 3)),
     {"channels_last": channels_last}, {}),
    (torch.matmul, lambda size: (torch.randn(size[-2:]), torch.randn(size[-2:]).t()),
     {"not contiguous": lambda x, y: (y.t() @ x.t()).t()},
     {"bf16 inside a product": lambda x, y: (x.bfloat16() @ y.bfloat16()).float()}),
]  # fmt: skip
RIGHT, FAULTS = (
    [Rewrite(name, it, reference, inputs) for reference, inputs, *columns in FUNCTIONS
     for name, it in columns[at].items()]
    for at in (0, 1)
)  # fmt: skip

# --- cheats ---


def fill(x, out):
    time.sleep(0.02)
    torch.softmax(x, -1, out=out)


def late(x):
    """Return zeros, in which a thread writes the result later."""
    out = torch.zeros_like(x)
    threading.Thread(target=fill, args=(x.detach(), out)).start()
    return out


class Lazy(torch.Tensor):
    """Tensor that computes the softmax only when a torch function reads it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        plain = [a.as_subclass(torch.Tensor) if isinstance(a, cls) else a for a in args]
        return function(
            *map(lambda a, b: softmax(a) if isinstance(b, cls) else a, plain, args),
            **(kwargs or {}),
        )


def by_caller(x):
    """Return zeros to callers that time the candidate, and the right result to other callers."""
    frame, names = sys._getframe(), set()
    while frame:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return torch.zeros_like(x) if names & {"_time", "_timed", "timed"} else softmax(x)


def cached(key):
    """Return a candidate that caches its answers by `key(input)`."""
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
    return x.detach().copy_(softmax(x.detach()))


def replacing(owner, name, value):
    """Return a candidate that replaces a function that the check of candidates calls."""

    def candidate(x):
        found = sys.modules.get(owner) or getattr(sys.modules["torch"], owner)
        setattr(found, name, value)
        return softmax(x)

    return candidate


def one_thread_for_all(x):
    torch.set_num_threads(torch.get_num_threads() + 1)
    return softmax(x)


def spoils_its_input(x):
    out = softmax(x)
    x.data.zero_()
    return out


class Worker:
    """Candidate that is right for 7 calls, then returns zeros, which its thread fills in later."""

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
            fill(*self.tasks.get())


def tiring():
    """Return a candidate that is right for 9 calls, then 2 % too large."""
    calls = itertools.count(1)
    return lambda x: softmax(x) * (1.0 if next(calls) < 10 else 1.02)


CHEATS = [Rewrite(name, it, softmax, one) for name, it in {
    "zeros": torch.zeros_like,
    "the input itself": lambda x: x,
    "another clock": replacing("time", "perf_counter", lambda: 0.0),
    "no synchronizing": replacing("torch.cuda", "synchronize", lambda *_: None),
    "allclose is always true": replacing("torch", "allclose", lambda *_, **__: True),
    "norms are zero": replacing(
        "torch.linalg", "vector_norm", lambda x, **__: torch.zeros(())),
    "other number of threads": one_thread_for_all,
    "work in another thread": late,
    "work in a thread of the first call": Worker(),
    "right for some calls": tiring(),
    "computed on demand": lambda x: x.detach().as_subclass(Lazy),
    "looks at its callers": by_caller,
    "cached by address": cached(lambda x: x.data_ptr()),
    "cached by shape": cached(lambda x: x.shape),
    "one place for all results": into_one_place(),
    "result in its input": into_its_input,
    "spoils its input": spoils_its_input,
}.items()]  # fmt: skip
