"""sdpa: which attention kernel is tried first."""

import torch
import torch.compiler.config
from torch.nn.functional import scaled_dot_product_attention

from speedkit_jupyter import SpeedConfig, apply_speedups, sdp_context


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
    torch.backends.cuda.enable_flash_sdp(True)  # somebody else's wish
    with sdp_context(first):
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    first.restore()
    assert first.kept == ("sdp.flash",)
    assert torch.compiler.config.cache_key_tag == ""
