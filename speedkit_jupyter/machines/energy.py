"""Joules, where the machine counts them: Intel's RAPL (AMD's too) on Linux, NVML on NVIDIA."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# One folder for each processor package; those of its parts (`intel-rapl:0:0`) are inside of it.
# https://docs.kernel.org/power/powercap/powercap.html
POWERCAP = Path("/sys/class/powercap")
PACKAGES = "intel-rapl:[0-9]"
MICRO, MILLI = 1e-6, 1e-3


def of_packages() -> Callable[[], float] | None:
    """Return what reads the joules of the processors since some moment: of all that runs on them.

    None where nothing counts them, or only root may read it. A counter of microjoules begins again
    at its end.
    """
    packages = sorted(POWERCAP.glob(PACKAGES))
    last, before = dict.fromkeys(packages, 0), dict.fromkeys(packages, 0)

    def read() -> float:
        for package in packages:
            now = int((package / "energy_uj").read_text())
            if now < last[package]:
                before[package] += int((package / "max_energy_range_uj").read_text())
            last[package] = now
        return (sum(last.values()) + sum(before.values())) * MICRO

    try:
        read()
    except (OSError, ValueError):
        return None
    return read if packages else None


def of_nvml(device: torch.device) -> Callable[[], float] | None:
    """Return the same of one GPU, from Volta on.

    None without NVIDIA's `nvidia-ml-py`, which torch uses for its own figures.
    """
    try:
        import torch

        pynvml = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # not installed, an older driver, a card that does not count
        return None
    return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * MILLI
