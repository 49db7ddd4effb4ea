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
    """What reads the joules of the processors since some moment: those of all that runs on them.

    None where nothing counts them.
    """
    packages = [_Package(folder) for folder in sorted(POWERCAP.glob(PACKAGES))]

    def read() -> float:
        return sum(package.joules() for package in packages)

    try:
        read()
    except (OSError, ValueError):  # most systems let only root read it
        return None
    return read if packages else None


class _Package:
    """A counter of microjoules that begins again at its end."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._last, self._before = folder, 0, 0

    def joules(self) -> float:
        now = self._value("energy_uj")
        if now < self._last:
            self._before += self._value("max_energy_range_uj")
        self._last = now
        return (self._before + now) * MICRO

    def _value(self, name: str) -> int:
        return int((self._folder / name).read_text())


def of_nvml(device: torch.device) -> Callable[[], float] | None:
    """The same of one GPU, from Volta on.

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
