"""Test `sdpa`, which chooses the attention kernel that torch tries first."""

import pytest
import torch
import torch.compiler.config
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from speedkit_jupyter import SpeedConfig, apply_speedups, sdp_context
from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.catalog.base.decision import Decision
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.torchglue import private as torch_private


def kernels() -> str:
    q = torch.rand(1, 2, 8, 16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        scaled_dot_product_attention(q, q, q)
    return " ".join(e.key for e in profile.key_averages() if "attention" in e.key)


def test_math_runs_the_math_kernel_while_applied():
    assert "flash" in kernels()
    kept = torch.nn.Linear(2, 2)
    with apply_speedups(kept, SpeedConfig(sdpa="math"))[1]:
        assert "flash" not in kernels()
        assert "math" in kernels()
    assert "flash" in kernels()


def test_the_context_holds_where_another_plan_is_in_force():
    kept = torch.nn.Linear(2, 2)
    _, first = apply_speedups(kept, SpeedConfig(sdpa="math"))
    first_tag = torch.compiler.config.cache_key_tag
    assert "sdpa:math" in first_tag
    torch.backends.cuda.enable_flash_sdp(True)  # as other code may set it
    with sdp_context(first):
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    first.restore()
    assert first.kept == ("sdp.flash",)
    assert torch.compiler.config.cache_key_tag == ""


@pytest.mark.parametrize(("device", "first"), [("cpu", []), ("cuda", ["cuda"])])
def test_on_a_gpu_the_order_is_set_after_torchs_first_call(monkeypatch, device, first):
    called = []

    def attention(q, *rest):
        called.append(q.device.type)
        torch_private.set_attention_order([1, 2, 0, 3, 4])
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    entry = next(one for one in CATALOG if one.name == "sdpa")
    with FakeTensorMode():
        model = torch.nn.ParameterList([torch.zeros(2, device=device)])
        before = torch_private.attention_order()
        with entry.switched(Decision("sdpa", "math", "asked for"), Target(model)):
            assert torch_private.attention_order()[0] == 0
        torch_private.set_attention_order(before)
    assert called == first
