"""Test `device`, which chooses the model's device. tests/device tests that a model moves."""

import re

import pytest
from decisions import cpu, machine, on

from speedkit_jupyter import Facts, SpeedConfig, plan


def test_what_follows_is_decided_for_the_new_device(hardware):
    decisions = plan(SpeedConfig(device="cpu"), hardware("t4"), Facts(parameters=1))
    assert decisions["precision"].value == "fp32"
    assert plan(SpeedConfig(), hardware("t4"), Facts(parameters=1))["precision"].value == "fp16"


# Results of `torch.cuda.get_arch_list()` in torch's wheels.
WHEELS = {
    "2.11.0+cu128": "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120",
    "2.11.0+cu126": "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90",
    "2.11.0": "sm_75 sm_80 compute_80",
    "2.11.0+mine": "sm_90a",
}


@pytest.mark.parametrize(
    ("gpu", "wheel", "why"),
    [
        ("p100", "2.11.0+cu128",
         r"no kernels for Tesla P100.* \(sm_60\); torch==2.11.0 .* cu126 has"),
        ("v100", "2.11.0+cu128", r"\(sm_70\); torch==2.11.0 from PyTorch's index cu126 has"),
        ("b200", "2.11.0+cu126", r"\(sm_100\); torch==2.11.0 from PyTorch's index cu130 has"),
        ("a100", "2.11.0+mine", r"\(sm_80\)$"),
        ("p100", "2.11.0+cu126", None),
        ("gtx1080", "2.11.0+cu126", None),
        ("t4", "2.11.0+cu128", None),
        ("l4", "2.11.0", None),
        ("rtx_pro_6000", "2.11.0+cu128", None),
        ("rtx_pro_6000", "2.11.0+cu126", r"\(sm_120\); torch==2.11.0 .* cu130 has"),
        ("h200", "2.11.0", None),
    ],
)  # fmt: skip
def test_a_gpu_without_kernels_in_this_torch_is_told_the_wheel_that_has(machine, gpu, wheel, why):
    built = {"torch": wheel, "cuda_architectures": tuple(WHEELS[wheel].split())}
    here = machine(gpu).model_copy(update=built)
    for facts in (Facts(), Facts(device="cuda:0")):
        decision = plan(SpeedConfig(), here, facts)["device"]
        assert re.search(why or "^(?!.*no kernels)", decision.reason)
        assert not (why and decision.active)
    assert plan(SpeedConfig(device="cuda"), here, Facts())["device"].declined == bool(why)


@pytest.mark.parametrize("device", ["xla:0", "tpu:0"])
def test_a_tpu_is_named_and_nothing_is_planned_for_it(hardware, device):
    found = plan(SpeedConfig(compile=True), hardware("cpu"), on(device, linears=4))
    assert found["device"].reason == f"{device} is a TPU, and SpeedKit has no plans for TPUs"
    assert found["compile"].declined
    assert not any(decision.active for decision in found)


@pytest.mark.parametrize("library", ["torch-xla", "torch-tpu"])
def test_a_library_for_tpus_is_named_to_a_model_on_the_cpu(library):
    decision = plan(SpeedConfig(), machine(f"cpu {library}=2.9.0"), cpu())["device"]
    assert f"{library} is installed, and SpeedKit has no plans for TPUs" in decision.reason
