"""Replay torch's recorded answers on real GPUs. Each record names its GitHub thread."""

from types import SimpleNamespace

import pytest
import torch

from speedkit_jupyter import Facts, Hardware, SpeedConfig, plan
from speedkit_jupyter.extras.data import batch_sizes
from speedkit_jupyter.step import memory

MIB, GIB = 2**20, 2**30
CUDA = torch.device("cuda")
# Each row has a GPU's recorded name, capability, bytes, multiprocessors and AMD architecture. The
# expected bf16, TF32 and precision follow. AMD GPUs stay at fp32 until bf16 is measured.
GPUS = {
    "NVIDIA/DALI#1813": ("Tesla T4", 7, 5, int(14.75 * GIB), 40, "", False, False, "fp16"),
    "bottlerocket-os/bottlerocket#3873": (
        "NVIDIA A100-SXM4-40GB", 8, 0, 42298834944, 108, "", True, True, "bf16",
    ),
    "NVIDIA/nccl#1637": (
        "NVIDIA GeForce RTX 5090", 12, 0, 33680457728, 170, "", True, True, "bf16",
    ),
    "ROCm/legacy-rocm-build#4203": (
        "AMD Instinct MI300X", 9, 4, 196592 * MIB, 304, "gfx942:sramecc+:xnack-", True, False,
        "fp32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("source", GPUS)
def test_the_properties_of_a_gpu_decide_its_precision(source, here, monkeypatch):
    name, major, minor, memory_bytes, count, rocm, bf16, tf32, precision = GPUS[source]
    properties = SimpleNamespace(
        name=name, major=major, minor=minor, total_memory=memory_bytes,
        multi_processor_count=count, gcnArchName=rocm or name,
    )  # fmt: skip
    monkeypatch.setattr(torch.version, "hip", "6.2.41133" if rocm else None)
    answers = {"is_available": True, "device_count": 2, "get_device_properties": properties}
    for function, answer in (answers | {"get_arch_list": []}).items():
        monkeypatch.setattr(torch.cuda, function, lambda *_, answer=answer: answer)
    hardware = Hardware.detect()
    gpu = hardware.accelerator("cuda:1")
    assert (gpu.name, gpu.memory_bytes, gpu.multiprocessors) == (name, memory_bytes, count)
    assert (gpu.bf16, gpu.tf32, gpu.is_nvidia) == (bf16, tf32, not rocm)
    facts = Facts(parameters=10**6, device="cuda:0", linears=4)
    assert plan(SpeedConfig(), hardware, facts)["precision"].value == precision


@pytest.fixture
def answers(monkeypatch):
    """Return `answers(stats, …)`, which makes torch's memory counters return each dict in turn."""

    def record(*stats, free_bytes=0, total_bytes=0):
        left = [*stats]
        answer = lambda device=None: left.pop(0) if len(left) > 1 else left[0]  # noqa: E731
        monkeypatch.setattr(torch.cuda, "memory_stats", answer)
        monkeypatch.setattr(torch.cuda.memory, "memory_stats", answer)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, total_bytes))
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda device=None: None)

    return record


def test_the_peak_of_a_step_is_what_the_counters_grew_by(answers):
    """Replay the memory counters of a diffusion model, from sgl-project/sglang#18865."""
    before = {"allocated_bytes.all.current": int(33905.64 * MIB)}
    answers(before, {"allocated_bytes.all.peak": int(53044.04 * MIB)})
    held = torch.ones(256)
    found = memory.needed(lambda: None, CUDA, [held])
    assert found.peak_bytes - held.nbytes == pytest.approx(19138.4 * MIB, abs=2)


def test_a_gpu_whose_counters_stay_zero_has_no_peak_above_the_state(answers):
    """Replay the counters of a gfx900 Radeon under ROCm 3.3, from ROCm/pytorch#703."""
    answers({"allocated_bytes.all.current": 0, "allocated_bytes.all.peak": 0})
    assert memory.needed(lambda: None, CUDA, [torch.ones(256)]) == memory.MemoryUse(1024, 1024)


def test_free_memory_includes_what_torch_has_cached(answers):
    """Replay a T4 that could not allocate 36 GiB, from Zheng-Chong/CatVTON#133."""
    allocated, cached = int(3.72 * GIB), int(264.21 * MIB)
    stats = {
        "allocated_bytes.all.current": allocated,
        "reserved_bytes.all.current": allocated + cached,
    }
    answers(stats, free_bytes=int(10.22 * GIB), total_bytes=int(14.56 * GIB))
    assert batch_sizes.free_bytes(CUDA) == int(10.22 * GIB) + cached
    assert memory.fits(2 * GIB, CUDA)
    assert not memory.fits(36 * GIB, CUDA)
