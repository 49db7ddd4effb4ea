"""Searches by Inductor itself: recorded, and replayed in an empty cache."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter.extras import autotune
from speedkit_jupyter.extras.autotune.tuner import Counted

pytestmark = [pytest.mark.slow, pytest.mark.compile, pytest.mark.thorough]


def compiled(model: nn.Module, x: torch.Tensor) -> Counted:
    """Compile a frozen model in an empty cache; return the counts of its searches."""
    torch._dynamo.reset()
    counted = autotune.record()
    try:
        with (
            torch.no_grad(),
            torch._inductor.config.patch(freezing=True),
            torch._inductor.utils.fresh_inductor_cache(),
        ):
            found = torch.compile(model, mode="max-autotune-no-cudagraphs")(x)
            torch.testing.assert_close(found, model(x), rtol=0.05, atol=0.5)
    finally:
        autotune.off()
    return counted


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_recorded_search_is_replayed(device):
    like = {"device": device, "dtype": torch.float32 if device == "cpu" else torch.bfloat16}
    model, x = nn.Linear(768, 512, bias=False, **like).eval(), torch.rand(1024, 768, **like)
    first = compiled(model, x)
    if first.searched == 0:
        pytest.skip("this device is offered one kernel only")
    [found] = autotune.models()
    assert found.name == autotune.detected(device)
    assert found.searches[0].problem.sizes == (1, 1024, 512, 768)
    assert len(found.searches[0].timings) > 1
    again = compiled(model, x)
    assert (again.searched, again.replayed) == (0, 1)
    assert again.seconds_saved == pytest.approx(first.searched_s)
