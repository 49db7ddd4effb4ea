"""cudnn_benchmark: cuDNN's search for an algorithm."""

from __future__ import annotations

import pytest
import torch

from speedkit_jupyter import SpeedConfig, apply_speedups


@pytest.mark.gpu
def test_it_is_set_and_put_back():
    model = torch.nn.Conv2d(1, 1, 3).cuda()
    with apply_speedups(model, SpeedConfig(cudnn_benchmark=True, compile=False))[1]:
        assert torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.benchmark
