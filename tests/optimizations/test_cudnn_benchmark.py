"""cudnn_benchmark: cuDNN's search for an algorithm."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, plan

CONVOLUTIONS = Facts(device="cuda:0", devices=("cuda:0",), parameters=1, convolutions=2)


def test_auto_leaves_it_to_measuring_for_convolutions_on_cuda(hardware):
    decision = plan(SpeedConfig(), hardware("t4"), CONVOLUTIONS)["cudnn_benchmark"]
    assert (decision.value, decision.active) == (False, False)
    assert decision.worth_measuring is True


def test_what_the_user_has_switched_on_is_left_and_not_offered(hardware):
    on = replace(CONVOLUTIONS, flags={"cudnn.benchmark": True})
    decision = plan(SpeedConfig(), hardware("t4"), on)["cudnn_benchmark"]
    assert (decision.value, decision.active, decision.worth_measuring) == (True, False, None)


def test_auto_respects_determinism_and_the_absence_of_convolutions(hardware):
    deterministic = Facts(device="cuda:0", devices=("cuda:0",), parameters=1, convolutions=2,
                          flags={"cudnn.deterministic": True})  # fmt: skip
    plain = Facts(device="cuda:0", devices=("cuda:0",), parameters=1)
    for facts in (deterministic, plain):
        assert not plan(SpeedConfig(), hardware("t4"), facts)["cudnn_benchmark"].active


def test_on_a_cpu_a_wish_is_declined():
    kept = torch.nn.Linear(2, 2)
    with apply_speedups(kept, SpeedConfig(cudnn_benchmark=True))[1] as context:
        assert context.plan["cudnn_benchmark"].declined
        assert torch.backends.cudnn.benchmark is False


@pytest.mark.gpu
def test_it_is_set_and_put_back():
    model = torch.nn.Conv2d(1, 1, 3).cuda()
    with apply_speedups(model, SpeedConfig(cudnn_benchmark=True, compile=False))[1]:
        assert torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.benchmark
