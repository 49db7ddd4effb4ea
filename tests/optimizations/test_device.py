"""device: where the model lies. Moving itself is tested on GPUs (test_gpu.py)."""

from __future__ import annotations

import pytest
import torch

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, plan


@pytest.mark.parametrize(
    ("machine", "where"),
    [("cpu", "cpu"), ("t4", "cuda:0"), ("apple_m2_mps", "mps"), ("arc_b580_xpu", "xpu:0")],
)
def test_auto_is_the_gpu_where_there_is_one(hardware, machine, where):
    assert plan(SpeedConfig(), hardware(machine), Facts(parameters=1))["device"].value == where


def test_auto_leaves_a_model_that_is_on_a_gpu(hardware):
    facts = Facts(parameters=1, device="cuda:1", devices=("cuda:1",))
    assert not plan(SpeedConfig(), hardware("a100"), facts)["device"].active


def test_a_model_on_several_devices_is_left_alone(hardware):
    facts = Facts(parameters=1, device="cuda:0", devices=("cuda:0", "cpu"))
    decision = plan(SpeedConfig(device="cuda:0"), hardware("a100"), facts)["device"]
    assert decision.declined
    assert not decision.active


def test_what_follows_is_decided_for_the_new_device(hardware):
    decisions = plan(SpeedConfig(device="cpu"), hardware("t4"), Facts(parameters=1))
    assert decisions["precision"].value == "fp32"
    assert plan(SpeedConfig(), hardware("t4"), Facts(parameters=1))["precision"].value == "fp16"


def test_meta_parameters_are_left_where_they_are():
    model = torch.nn.Linear(2, 2, device="meta")
    with apply_speedups(model, SpeedConfig(device="cpu"))[1] as context:
        assert context.plan["device"].declined
