"""Operations of a step and the machine's own limit."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.measure.checks import roofline

pytestmark = pytest.mark.usefixtures("made_time")


def test_operations_are_those_of_the_products():
    layer, x = nn.Linear(30, 20), torch.rand(10, 30)
    assert roofline.flops(lambda: layer(x)) == 2 * 10 * 30 * 20
    assert roofline.flops(lambda: layer(x).sum().backward()) == 2 * (2 * 10 * 30 * 20)


def test_the_peak_is_measured_once_and_holds_for_large_products():
    cpu = torch.device("cpu")
    found = roofline.peak(cpu, torch.float32)
    assert roofline.peak(cpu, torch.float32) == found
    assert found.flops_per_s > 1e8
    assert found.bytes_per_s > 1e8
    assert found.limit_s(200, 10**20) == 10**20 / found.bytes_per_s
    assert found.limit_s(10**20, 10) == 10**20 / found.flops_per_s


def test_no_variant_is_beyond_the_limit():
    network = nn.Linear(512, 512)
    x = torch.rand(512, 512)
    comparison = benchmark(lambda: network(x).sum().backward(), "baseline,auto", budget_s=0.3)
    assert comparison.flops == 2 * (2 * 512**3)
    assert 0 < comparison.share_of_limit(comparison.baseline) <= 1


def test_kernels_that_do_many_operations_at_once_are_counted_too():
    lstm, x = nn.LSTM(16, 32), torch.rand(5, 2, 16)
    gates = 4 * 32
    assert roofline.flops(lambda: lstm(x), [lstm]) == 2 * 5 * 2 * gates * (16 + 32)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()

    def infer() -> None:
        with torch.inference_mode():
            layer(torch.rand(2, 8, 32))

    assert roofline.flops(infer, [layer]) > 2 * 16 * (4 * 32 * 32 + 2 * 32 * 64)


def test_the_peak_is_that_of_convolutions_where_these_are_faster(monkeypatch):
    monkeypatch.setattr(torch, "mm", lambda *_, out: time.sleep(0.5))
    found = roofline.peak(torch.device("cpu"), torch.float32, "slow products")
    assert found.flops_per_s > 2 * 512**3 / 0.5
