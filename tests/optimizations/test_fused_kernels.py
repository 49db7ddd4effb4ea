"""fused_kernels: what is decided, and which modules are known. What the kernels compute is in
test_fused_kernels_run.py, which the last test here runs in Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import FAMILIES, language_model
from torch import nn
from torch.nn import functional as F

from speedkit_jupyter import ConfigError, Facts, Hardware, SpeedConfig, code, plan
from speedkit_jupyter.optimizations import named
from speedkit_jupyter.optimizations.facts.alike import alike
from speedkit_jupyter.optimizations.facts.fusible import Fusible, Gated, Norm, fusible
from speedkit_jupyter.optimizations.fused_kernels import FusedKernels
from speedkit_jupyter.optimizations.fusing import liger
from speedkit_jupyter.optimizations.fusing.fused_rotations import with_other
from speedkit_jupyter.tuning.candidates import candidates

KINDS = tuple(FusedKernels.kinds)

ENTRY = named("fused_kernels")
ON = SpeedConfig(fused_kernels=True).alone()
LLAMA = Facts(
    device="cuda:0",
    parameters=100,
    linears=9,
    fusible=(
        Fusible("rms_norm", "norm", "LlamaRMSNorm", Norm("variance_epsilon", 0.0, "llama")),
        Fusible(
            "swiglu",
            "mlp",
            "LlamaMLP",
            Gated("gate_proj", "up_proj", "down_proj", "act_fn", "swiglu"),
        ),
        Fusible("rope", "attn", "LlamaAttention", "transformers.models.llama.modeling_llama"),
    ),
)


def with_liger(machine: Hardware, version: str = "0.8.5", **more: Any) -> Hardware:
    return machine.model_copy(update={"libraries": {"liger-kernel": version}, **more})


def found(model: nn.Module) -> list[tuple[str, str]]:
    return [(place.kind, place.name) for place, _ in fusible(model)]


# --- what is decided ---


@pytest.mark.parametrize("machine", ["a100", "h200", "t4", "v100"])
def test_on_nvidia_it_is_offered_and_never_taken_by_rule(hardware, machine):
    decision = plan(SpeedConfig(), with_liger(hardware(machine)), LLAMA)["fused_kernels"]
    assert (decision.active, decision.worth_measuring) == (False, True)
    assert "1 RMSNorm (LlamaRMSNorm), 1 gated MLP (LlamaMLP)" in decision.reason


@pytest.mark.parametrize(("machine", "device"), [("mi300x", "cuda:0"), ("arc_b580_xpu", "xpu:0")])
def test_on_amds_and_intels_gpus_it_is_there_on_request(hardware, machine, device):
    here, facts = with_liger(hardware(machine)), replace(LLAMA, device=device)
    decision = plan(SpeedConfig(), here, facts)["fused_kernels"]
    assert (decision.active, decision.worth_measuring, decision.declined) == (False, None, False)
    assert plan(ON, here, facts)["fused_kernels"].active
    assert ENTRY.candidates(here, facts) == ()


@pytest.mark.parametrize(
    ("machine", "changes", "facts", "why"),
    [
        ("h200", {"libraries": {}}, {}, "needs liger-kernel: pip install liger-kernel"),
        ("h200", {"libraries": {"liger-kernel": "0.3.1"}}, {}, "this is 0.3.1: pip install -U"),
        ("h200", {"libraries": {"liger-kernel": "unknown"}}, {}, "this is unknown"),
        ("h200", {"triton": False}, {}, "no working Triton on Linux: pip install triton"),
        ("rtx4050_laptop_windows", {}, {}, "pip install triton-windows"),
        ("gtx1080", {}, {}, "compute capability 7.0; NVIDIA GeForce GTX 1080 has 6.1"),
        ("cpu", {}, {"device": "cpu"}, "for GPUs by CUDA, ROCm and XPU; this is cpu"),
        ("apple_m2_mps", {}, {"device": "mps"}, "this is mps"),
        ("h200", {}, {"fusible": ()}, "the model has no RMSNorm"),
        ("h200", {}, {"compiled": "script"}, "TorchScript"),
        ("h200", {}, {"compiled": "in place"}, "compiled code passes by them"),
        ("h200", {}, {"compiled": "wrapper"}, "compiled code passes by them"),
    ],
)
def test_it_is_declined_with_the_reason_and_the_next_step(hardware, machine, changes, facts, why):
    here = with_liger(hardware(machine)).model_copy(update=changes)
    config = SpeedConfig(fused_kernels=True, device=facts.get("device", "auto"))
    decision = plan(config, here, replace(LLAMA, **facts))["fused_kernels"]
    assert decision.declined
    assert not decision.active
    assert why in decision.reason


def test_each_kind_has_its_switch(hardware):
    here = with_liger(hardware("h200"))
    assert plan(ON, here, LLAMA)["fused_kernels"].details == {
        "rms_norm": True, "swiglu": True, "rope": True,
    }  # fmt: skip
    words = ENTRY.changes()
    assert set(words) == {"fused_kernels", *(f"fused_kernels:{kind}" for kind in KINDS)}
    for kind in KINDS:
        wish = words[f"fused_kernels:{kind}"]
        decision = plan(SpeedConfig(fused_kernels=wish).alone(), here, LLAMA)["fused_kernels"]
        assert [name for name, on in decision.details.items() if on] == [kind]
        less = replace(LLAMA, fusible=tuple(p for p in LLAMA.fusible if p.kind != kind))
        lacking = plan(SpeedConfig(fused_kernels=wish), here, less)["fused_kernels"]
        assert f"the model has nothing for {kind}" in lacking.reason
    none = {"enabled": True} | dict.fromkeys(KINDS, False)
    assert "no kind is chosen" in plan(SpeedConfig(fused_kernels=none), here, LLAMA)[
        "fused_kernels"
    ].reason  # fmt: skip


def test_false_leaves_it_and_a_wrong_word_is_told(hardware):
    asked = SpeedConfig(fused_kernels=False)
    assert not plan(asked, with_liger(hardware("h200")), LLAMA)["fused_kernels"].active
    with pytest.raises(ConfigError, match="rms_norm, swiglu, rope"):
        SpeedConfig(fused_kernels={"norm": True})


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch._C, "_get_tracing_state"),
        (torch._C._functorch, "is_functorch_wrapped_tensor"),
        (torch.autograd.forward_ad, "_current_level"),
        (torch.nn.modules.module, "_has_any_global_hook"),
    ],
)
def test_where_torch_has_moved_what_it_stands_on_it_is_declined_by_name(
    hardware, monkeypatch, owner, name
):
    monkeypatch.delattr(owner, name)
    decision = plan(ON, with_liger(hardware("h200")), LLAMA)["fused_kernels"]
    assert decision.declined
    assert name in decision.rule


def test_beside_it_nothing_is_compiled_and_no_search_tries_both(hardware):
    here = with_liger(hardware("h200"))
    assert plan(SpeedConfig(), here, LLAMA)["compile"].active
    both = plan(SpeedConfig(fused_kernels=True), here, LLAMA)
    assert both["fused_kernels"].active
    assert "compiled code passes by fused_kernels" in both["compile"].reason
    assert "fused_kernels" in [one.name for one in candidates(here, LLAMA)]
    assert "compile" in ENTRY.excludes


@pytest.mark.parametrize("machine", ["cpu", "mi300x", "apple_m2_mps"])
def test_no_search_tries_it_elsewhere_or_without_such_modules(hardware, machine):
    assert ENTRY.candidates(with_liger(hardware(machine)), LLAMA) == ()
    assert ENTRY.candidates(with_liger(hardware("h200")), replace(LLAMA, fusible=())) == ()
    assert ENTRY.candidates(hardware("h200").model_copy(update={"libraries": {}}), LLAMA) == ()


# --- which modules are known ---


class Norm1(nn.Module):
    """As a notebook may have it."""

    def __init__(self, dim: int = 6, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, values):
        return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, values):
        result = self._norm(values.float()).type_as(values)
        return result * self.weight


class Dividing(Norm1):
    def _norm(self, values):
        return values / torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.eps)


class Twice(Norm1):
    def forward(self, values):
        result = self._norm(values.float()).type_as(values)
        return result * self.weight * self.weight


class Swapped(Norm1):
    def forward(values, self):
        result = self._norm(values.float()).type_as(values)
        return result * self.weight


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(6, 5), nn.Linear(5, 6), nn.Linear(6, 5)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class WithGelu(FeedForward):
    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)) * self.w3(x))


class Mlp(nn.Module):
    def __init__(self, act_fn: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(6, 5), nn.Linear(6, 5)
        self.down_proj, self.act_fn = nn.Linear(5, 6), act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.RMSNorm(6), "rms_norm"),
        (nn.RMSNorm(6, elementwise_affine=False), None),
        (nn.RMSNorm((2, 6)), None),
        (nn.LayerNorm(6), None),
        (Norm1(), "rms_norm"),
        (Dividing(), None),
        (Twice(), None),
        (Swapped(), None),
        (nn.utils.parametrizations.weight_norm(Norm1(), dim=None), None),
        (FeedForward(), "swiglu"),
        (WithGelu(), None),
        (Mlp(nn.SiLU()), "swiglu"),
        (Mlp(F.silu), "swiglu"),
        (Mlp(nn.GELU(approximate="tanh")), "swiglu"),
        (Mlp(nn.GELU()), None),
        (Mlp(nn.ReLU()), None),
        (Mlp(lambda x: x), None),
        (torch.jit.script(nn.RMSNorm(6)), None),
        (nn.LazyLinear(3), None),
    ],
)
def test_a_module_is_known_by_what_its_forward_computes(module, kind):
    assert [name for name, _ in found(module)] == ([] if kind is None else [kind])


def test_a_forward_on_the_instance_and_a_call_of_its_own_are_left_alone():
    norm = Norm1()
    norm.forward = lambda values: values
    assert found(norm) == []

    class Calling(Norm1):
        def __call__(self, values):
            return super().__call__(values) + 1

    assert found(Calling()) == []


def test_the_same_instructions_mean_the_same_only_by_the_same_names(monkeypatch):
    one = Norm1.forward
    assert alike(one, one)
    other = with_other(Norm1._norm, {"torch": object()})
    assert not alike(other, Norm1._norm)
    assert not alike(len, one)
    assert not alike(None, one)


def test_a_function_with_other_names_sees_all_the_rest_as_it_is_now(monkeypatch):
    monkeypatch.setitem(globals(), "scale", lambda x: 2 * x)
    monkeypatch.setitem(globals(), "shift", 1)
    monkeypatch.setitem(
        globals(), "function", eval("lambda x, *, y=3: scale(x) + shift + y", globals())
    )
    function = globals()["function"]
    other = with_other(function, {"scale": lambda x: 10 * x})
    assert (function(1), other(1)) == (6, 14)
    monkeypatch.setitem(globals(), "shift", 5)
    assert (function(1), other(1, y=0)) == (10, 15)
    assert "scale" in function.__globals__
    assert other(1) == 18
    with pytest.raises(NameError):
        with_other(lambda: nowhere, {})()  # noqa: F821


EXPECTED = {
    "llama": (5, 2, 2), "mistral": (5, 2, 2), "qwen2": (5, 2, 2),
    "qwen3": (9, 2, 2), "gemma": (5, 2, 2), "gemma2": (9, 2, 2),
    "gemma3": (13, 2, 2), "olmo2": (9, 2, 0), "granite": (5, 2, 2),
    "smollm3": (5, 2, 2), "phi3": (5, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_in_models_of_transformers_every_module_is_found(family):
    pytest.importorskip("transformers")
    model = language_model(family)
    names = [kind for kind, _ in found(model)]
    counts = tuple(names.count(kind) for kind in ("rms_norm", "swiglu", "rope"))
    norms = sum("RMSNorm" in type(module).__name__ for module in model.modules())
    assert counts == EXPECTED[family]
    assert counts[0] == norms


def test_reading_the_facts_changes_nothing():
    model = nn.Sequential(Norm1(), FeedForward())
    before = [sorted(part.__dict__) for part in model.modules()]
    facts = Facts.read(model)
    assert [place.path for place in facts.fusible] == ["0", "1"]
    assert [sorted(part.__dict__) for part in model.modules()] == before


# --- the code to take along ---


@pytest.mark.parametrize("form", ["torch", "accelerate", "fabric", "transformers"])
def test_the_code_to_take_along_is_ligers_own(form, hardware):
    text = code(plan(ON, with_liger(hardware("h200")), LLAMA), form=form)
    compile(text, "code", "exec")
    if form == "transformers":
        assert "use_liger_kernel=True" in text
        assert '"fused_linear_cross_entropy": False' in text
        return
    assert "liger.liger_rms_norm" in text
    assert "liger.liger_swiglu(mlp.gate_proj(x), mlp.up_proj(x))" in text
    assert "modeling_llama.apply_rotary_pos_emb = liger_rotary_pos_emb" in text
    assert "fused_linear_cross_entropy" not in text


def test_the_code_for_torchs_own_norms(hardware):
    facts = replace(LLAMA, fusible=Facts.read(nn.RMSNorm(6)).fusible)
    for form in ("torch", "transformers"):
        text = code(plan(ON, with_liger(hardware("h200")), facts), form=form)
        assert "torch.finfo(torch.float32).eps if norm.eps is None" in text


# --- what it does ---

MISSING = "" if "liger-kernel" in Hardware.detect().libraries else "needs liger-kernel"
if not MISSING and not Hardware.detect().triton:
    MISSING = "needs triton"


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests run on the GPU itself")
def test_the_kernels_agree_with_the_modules_in_tritons_interpreter():
    """Triton asks for its interpreter when it is imported, so that takes a process of its own."""
    file = Path(__file__).with_name("test_fused_kernels_run.py")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_its_limits_are_those_of_the_library():
    assert ENTRY.library == liger.LIBRARY
    assert not liger.INTERPRETED
