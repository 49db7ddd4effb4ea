"""device: the device of the model. Moving itself is tested on GPUs (test_gpu.py)."""

from __future__ import annotations

import torch

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, plan


def test_what_follows_is_decided_for_the_new_device(hardware):
    decisions = plan(SpeedConfig(device="cpu"), hardware("t4"), Facts(parameters=1))
    assert decisions["precision"].value == "fp32"
    assert plan(SpeedConfig(), hardware("t4"), Facts(parameters=1))["precision"].value == "fp16"


def test_meta_parameters_are_left_where_they_are():
    model = torch.nn.Linear(2, 2, device="meta")
    with apply_speedups(model, SpeedConfig(device="cpu"))[1] as context:
        assert context.plan["device"].declined
