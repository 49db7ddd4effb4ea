"""tf32: reduced precision inside float32 products."""

from __future__ import annotations

import pytest
import torch

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, plan
from speedkit_jupyter.machines import flags

ON_GPU = Facts(device="cuda:0", devices=("cuda:0",), parameters=1)


@pytest.mark.parametrize(
    ("machine", "value", "active"),
    [("a100", "high", True), ("h200", "high", True), ("t4", "highest", False),
     ("p100", "highest", False), ("mi300x", "highest", False)],
)  # fmt: skip
def test_auto_is_on_from_compute_capability_8(hardware, machine, value, active):
    decision = plan(SpeedConfig(), hardware(machine), ON_GPU)["tf32"]
    assert (decision.value, decision.active) == (value, active)


def test_high_changes_nothing_on_a_cpu_and_is_declined(hardware):
    decision = plan(SpeedConfig(tf32="high"), hardware("cpu_avx512_bf16"), Facts())["tf32"]
    assert decision.declined
    assert "medium" in decision.reason


@pytest.mark.parametrize("machine", ["a100", "cpu_avx512_bf16"])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_it_is_declined_where_nothing_is_in_float32(hardware, machine, dtype):
    device = "cpu" if machine.startswith("cpu") else "cuda:0"
    facts = Facts(device=device, devices=(device,), parameters=1, dtypes=(dtype,))
    decision = plan(SpeedConfig(tf32="medium"), hardware(machine), facts)["tf32"]
    assert decision.declined
    assert f"parameters are {dtype}" in decision.reason


def test_medium_is_there_on_a_cpu_with_bf16_units_by_request_only(hardware):
    machine = hardware("cpu_avx512_bf16")
    assert plan(SpeedConfig(tf32="medium"), machine, Facts())["tf32"].active
    assert not plan(SpeedConfig(), machine, Facts())["tf32"].active
    assert plan(SpeedConfig(tf32="medium"), hardware("cpu"), Facts())["tf32"].declined


def test_a_setting_of_the_users_is_left(hardware):
    found = {"float32_matmul_precision": "medium", "cudnn.allow_tf32": True}
    facts = Facts(device="cuda:0", devices=("cuda:0",), parameters=1, flags=found)
    assert not plan(SpeedConfig(), hardware("a100"), facts)["tf32"].active


def _is_mixed() -> bool:
    try:
        torch.get_float32_matmul_precision()
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("mixed", [False, True])
def test_it_is_set_readable_and_put_back_also_from_mixed_apis(machine, mixed, changing_flags):
    machine("cpu_avx512_bf16")
    if mixed:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert _is_mixed()
    before = flags.snapshot()
    config = SpeedConfig(tf32="medium", precision="fp32", threads=torch.get_num_threads())
    kept = torch.nn.Linear(2, 2)
    with apply_speedups(kept, config)[1]:
        assert torch.get_float32_matmul_precision() == "medium"
        assert not _is_mixed()
    assert flags.diff(before, flags.snapshot()) == ()
    assert _is_mixed() == mixed
