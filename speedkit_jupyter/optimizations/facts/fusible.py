"""Which modules Liger has a kernel for, known by what their forward computes.

The functions below are never called: a forward is compared with them. So every class of
transformers that computes like Llama's, Gemma's or OLMo's is found, and so is a copy of it in a
notebook; one that a newer version computes otherwise is not, and stays as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from speedkit_jupyter.optimizations.facts.alike import alike

if TYPE_CHECKING:
    import torch
    from torch.nn import functional as F

Kind = Literal["rms_norm", "swiglu", "rope"]
ROTATE = "apply_rotary_pos_emb"


class Norm(NamedTuple):
    """How an RMSNorm rounds and what it adds to its weight; `eps` is the attribute that has it."""

    eps: str
    offset: float
    casting: str


class Gated(NamedTuple):
    """The names of the three layers of an MLP with a gate and of its activation, and the kernel for
    it. The activation has none where it is a function that the forward names.
    """

    gate: str
    up: str
    down: str
    activation: str
    kernel: str


class Fusible(NamedTuple):
    """One module: its path in the model, its class, and how its kernel is called."""

    kind: Kind
    path: str
    name: str
    how: Any = None


def fusible(model: torch.nn.Module) -> Iterator[tuple[Fusible, torch.nn.Module]]:
    """Every module that there is a kernel for, a shared one at the first of its places."""
    import torch

    for path, module in model.named_modules():
        kind: Any = type(module)
        is_script = isinstance(module, torch.jit.ScriptModule)
        own_call = kind.__call__ is not torch.nn.Module.__call__
        if is_script or own_call or "forward" in module.__dict__:
            continue
        if how := _norm(module):
            yield Fusible("rms_norm", path, kind.__name__, how), module
        elif gated := _gated(module):
            yield Fusible("swiglu", path, kind.__name__, gated), module
        elif _rotates(module):
            yield Fusible("rope", path, kind.__name__, kind.__module__), module


def eps_of(norm: torch.nn.Module, how: Norm) -> float:
    """What is added below the root; where torch's own has none, the least of float32."""
    import torch

    eps = getattr(norm, how.eps)
    return torch.finfo(torch.float32).eps if eps is None else float(eps)


# --- norms ---


def _as_llama(self: Any, x: Any) -> Any:
    dtype = x.dtype
    x = x.to(torch.float32)
    mean = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(mean + self.variance_epsilon)
    return self.weight * x.to(dtype)


def _as_olmo(self: Any, x: Any) -> Any:
    dtype = x.dtype
    x = x.to(torch.float32)
    mean = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(mean + self.variance_epsilon)
    return (self.weight * x).to(dtype)


def _normed(self: Any, x: Any) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def _as_gemma(self: Any, x: Any) -> Any:
    output = self._norm(x.float())
    output = output * (1.0 + self.weight.float())
    return output.type_as(x)


def _as_meta(self: Any, x: Any) -> Any:
    output = self._norm(x.float()).type_as(x)
    return output * self.weight


NORMS = (
    (_as_llama, None, Norm("variance_epsilon", 0.0, "llama")),
    (_as_olmo, None, Norm("variance_epsilon", 0.0, "gemma")),
    (_as_gemma, _normed, Norm("eps", 1.0, "gemma")),
    (_as_meta, _normed, Norm("eps", 0.0, "llama")),
)
# torch's own computes all of it in float32.
TORCHS = Norm("eps", 0.0, "gemma")


def _norm(module: torch.nn.Module) -> Norm | None:
    kind: Any = type(module)
    how = _norm_of(kind)
    if how is None or not hasattr(module, how.eps):
        return None
    weight = module._parameters.get("weight")
    alone = weight is not None and len(module._parameters) == 1
    return how if alone and weight is not None and weight.dim() == 1 else None


def _norm_of(kind: Any) -> Norm | None:
    from torch import nn

    if kind is nn.RMSNorm:
        return TORCHS
    for forward, helper, how in NORMS:
        helps = helper is None or alike(getattr(kind, "_norm", None), helper)
        if alike(kind.forward, forward) and helps:
            return how
    return None


# --- MLPs with a gate ---


def _in_two_lines(self: Any, x: Any) -> Any:
    y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return y  # noqa: RET504


def _in_one_line(self: Any, x: Any) -> Any:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _by_function(self: Any, x: Any) -> Any:
    return self.w2(F.silu(self.w1(x)) * self.w3(x))


def _gated(module: torch.nn.Module) -> Gated | None:
    kind: Any = type(module)
    if alike(kind.forward, _by_function):
        return Gated("w1", "w3", "w2", "", "swiglu")
    if not (alike(kind.forward, _in_two_lines) or alike(kind.forward, _in_one_line)):
        return None
    kernel = _kernel(getattr(module, "act_fn", None))
    return Gated("gate_proj", "up_proj", "down_proj", "act_fn", kernel) if kernel else None


def _kernel(activation: Any) -> str:
    """The name of the one that multiplies by this activation; empty where there is none."""
    from torch import nn

    ours = sys.modules.get("transformers.activations")
    silus = (nn.SiLU, getattr(ours, "SiLUActivation", nn.SiLU))
    if type(activation) in silus or activation is nn.functional.silu:
        return "swiglu"
    if type(activation) is nn.GELU:
        return "geglu" if activation.approximate == "tanh" else ""
    tanh = getattr(ours, "GELUTanh", getattr(ours, "PytorchGELUTanh", None))
    act = getattr(activation, "act", None) if tanh and type(activation) is tanh else None
    if not isinstance(act, partial) or act.func is not nn.functional.gelu:
        return ""
    return "geglu" if act.keywords == {"approximate": "tanh"} else ""


# --- rotations ---


def rotate_half(x: Any) -> Any:
    """As every copy of it in transformers."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def _rotated(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def _rotates(module: torch.nn.Module) -> bool:
    """Whether this is an attention of transformers whose forward calls the function above."""
    forward: Any = type(module).forward
    is_theirs = type(module).__module__.startswith("transformers.")
    if not is_theirs or not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return False
    calls = ROTATE in forward.__code__.co_names
    return calls and alike(forward.__globals__.get(ROTATE), _rotated)
