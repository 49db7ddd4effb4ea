"""Searches of this CPU, by Inductor itself: recorded, and replayed in an empty cache."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter.extras import autotune
from speedkit_jupyter.extras.autotune.tuner import Counted

pytestmark = [pytest.mark.slow, pytest.mark.compile, pytest.mark.thorough]


def compiled(model: nn.Module, x: torch.Tensor) -> Counted:
    """Compile a frozen model in an empty cache; returns what was counted."""
    torch._dynamo.reset()
    counted = autotune.record()
    try:
        with (
            torch.no_grad(),
            torch._inductor.config.patch(freezing=True),
            torch._inductor.utils.fresh_inductor_cache(),
        ):
            found = torch.compile(model, mode="max-autotune-no-cudagraphs")(x)
            torch.testing.assert_close(found, model(x))
    finally:
        autotune.off()
    return counted


def test_what_a_cpu_has_searched_is_replayed():
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    x = torch.rand(16, 64)
    first = compiled(model, x)
    if first.searched == 0:
        pytest.skip("this CPU is offered one kernel only")
    [found] = autotune.models()
    assert found.name == autotune.detected("cpu")
    assert found.searches[0].problem.sizes == (1, 16, 32, 64)
    assert len(found.searches[0].timings) == 2
    again = compiled(model, x)
    assert (again.searched, again.replayed) == (0, 1)
    assert again.seconds_saved == pytest.approx(first.searched_s)
