"""Searches of a real GPU: recorded, replayed, and predicted from other shapes."""

from __future__ import annotations

import pytest
import torch

from speedkit_jupyter.extras import autotune

pytestmark = [pytest.mark.gpu, pytest.mark.compile]


def compile_product(m: int, n: int, k: int) -> torch.Tensor:
    torch._dynamo.reset()
    a, b = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (k, n)))
    with torch._inductor.utils.fresh_inductor_cache():
        found = torch.compile(torch.mm, mode="max-autotune-no-cudagraphs")(a, b)
    torch.testing.assert_close(found, a @ b, rtol=0.05, atol=0.5)
    return found


def test_what_a_gpu_has_searched_is_replayed():
    try:
        recorded = autotune.record()
        compile_product(1024, 512, 768)
        assert (recorded.searched, recorded.replayed) == (1, 0)
        [model] = autotune.models()
        assert model.name == autotune.detected("cuda")
        assert len(model.searches[0].timings) > 4
        replayed = autotune.record()
        compile_product(1024, 512, 768)
        assert (replayed.searched, replayed.replayed) == (0, 1)
        assert replayed.seconds_saved == pytest.approx(recorded.searched_s)
    finally:
        autotune.off()


def test_without_a_model_a_gpu_searches_all():
    with autotune.predictions() as counted:
        compile_product(512, 512, 512)
    assert (counted.predictions, counted.fallbacks, counted.searched) == (0, 1, 1)
