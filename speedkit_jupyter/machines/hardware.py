"""Describe the machine that plans are made for. It is detected, or read from JSON."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from speedkit_jupyter import machines
from speedkit_jupyter.machines import devices, gemm_rates
from speedkit_jupyter.machines.gemm_rates import GemmRates
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import ConfigError, printable
from speedkit_jupyter.support.tracebacks import hide_internal_frames

# Chips of compute capability 7.5 without Tensor Cores (TU116 and TU117); source:
# NVIDIA's "Turing" product pages.
_NO_TENSOR_CORES = re.compile(
    r"GTX 16\d\d|MX4[35]0|MX550|\bT(400|500|550|600|1000|1200)\b|Quadro T(400|600|1000|1200|2000)"
)
# Items of `torch.cuda.get_arch_list()`: `sm_86` runs on GPUs 8.6 to 8.9, `compute_90` from 9.0 on.
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)[af]?")
# PyTorch's wheel indexes with kernels for capabilities below 7.5, and for 10.0 and later; source:
# `torch.cuda.PYTORCH_RELEASES_CODE_CC` of torch 2.13, and the release notes of 2.11.
_OLD_GPUS, _NEW_GPUS = "cu126", "cu130"
# AMD architectures with bf16 matrix instructions; source: AMD's ROCm hardware specifications.
_ROCM_BF16 = re.compile(r"gfx(908|90a|94|95|11|12)")

# Optional libraries that decisions depend on, by their names on PyPI.
OPTIONAL = ("torchao", "flash-attn-3", "flash-attn-4", *devices.TPUS.values())

Shown = Annotated[str, pydantic.AfterValidator(printable)]


class _Record(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class Cpu(_Record):
    """The processor, as far as this process may use it. `gemm` has its measured GEMM rates."""

    name: Shown = "unknown"
    architecture: Shown = "x86_64"
    logical_cores: pydantic.PositiveInt = 1
    usable_cores: pydantic.PositiveInt = 1
    memory_bytes: pydantic.NonNegativeInt = 0
    features: tuple[str, ...] = ()
    gemm: GemmRates | None = None

    @property
    def bf16(self) -> bool:
        """Return whether the processor multiplies bf16 in hardware."""
        return bool({"avx512_bf16", "amx_bf16", "arm_bf16"} & set(self.features))


class Accelerator(_Record):
    """One GPU. `capability` is torch's (major, minor); `rocm` is the AMD architecture's name."""

    kind: devices.Name
    name: Shown = "unknown"
    capability: tuple[pydantic.NonNegativeInt, pydantic.NonNegativeInt] | None = None
    rocm: Shown | None = None
    memory_bytes: pydantic.NonNegativeInt = 0
    multiprocessors: pydantic.NonNegativeInt = 0
    bf16_reported: bool = False

    @property
    def is_nvidia(self) -> bool:
        """Return whether this is an NVIDIA GPU with a known compute capability."""
        return self.rocm is None and self.capability is not None

    @property
    def tensor_cores(self) -> bool:
        """Return whether the GPU has NVIDIA Tensor Cores (7.0 and later, but not TU116, TU117)."""
        new = self.is_nvidia and self.capability is not None and self.capability >= (7, 0)
        return new and not _NO_TENSOR_CORES.search(self.name)

    @property
    def bf16(self) -> bool:
        """Return whether bf16 runs in hardware. On MPS, return whether it runs at all."""
        if self.rocm is not None:
            return bool(_ROCM_BF16.match(self.rocm))
        if self.capability is not None:
            return self.capability >= (8, 0)
        return self.bf16_reported

    @property
    def emulates_bf16(self) -> bool:
        """Return whether bf16 is emulated, and therefore slow: on Apple's M1."""
        return self.kind == "mps" and "M1" in self.name.split()

    @property
    def tf32(self) -> bool:
        """Return whether the GPU multiplies float32 matrices in TF32 (NVIDIA, 8.0 and later)."""
        return self.is_nvidia and self.bf16


class Hardware(_Record):
    """The properties of a machine that plans depend on.

    `Hardware.current()` is this machine, or the one set by SPEEDKIT_HARDWARE. `cxx` is the C++
    compiler that Inductor would call, or None. `cuda_architectures` are the GPUs that torch was
    built for, or empty if they are unknown. `libraries` maps the PyPI name of each installed
    optional library to its version (default: the libraries of this environment).
    """

    system: Literal["Linux", "Windows", "Darwin"] = "Linux"
    python: str = "3.12"
    torch: str = "2.13.0"
    cpu: Cpu = Cpu()
    accelerators: tuple[Accelerator, ...] = ()
    cxx: str | None = None
    triton: bool = False
    cuda_architectures: tuple[Shown, ...] = ()
    libraries: dict[str, Shown] = pydantic.Field(
        default_factory=lambda: installed_versions(OPTIONAL)
    )
    _pinned: str = pydantic.PrivateAttr("")

    @property
    def pinned(self) -> str:
        """Return the name of the machine set by SPEEDKIT_HARDWARE, or an empty string."""
        return self._pinned

    def accelerator(self, device: str) -> Accelerator | None:
        """Return the accelerator of a device string ("cuda", "cuda:1", "mps"); None if missing."""
        kind, _, index = device.partition(":")
        every = [accelerator for accelerator in self.accelerators if accelerator.kind == kind]
        return dict(enumerate(every)).get(int(index or 0))

    def describe(self, device: str) -> str:
        """Return a device's name for users, with the usable cores of a CPU.

        A device that SpeedKit doesn't know, such as an NPU, keeps torch's name.
        """
        gpu, cores = self.accelerator(device), self.cpu.usable_cores
        cpu = f"{self.cpu.name}, {cores} usable core{'s' if cores != 1 else ''}"
        name = gpu.name if gpu is not None else cpu if device in ("cpu", "meta") else device
        return f"{name} ({machines.as_for(self.pinned)})" if self.pinned else name

    def fingerprint(self, device: str) -> str:
        """Return the device's description and torch's version; learned plans depend on both."""
        return f"{self.describe(device)}\n{self.torch}"

    def missing_kernels(self, device: str) -> str:
        """Return a warning if torch lacks kernels for a device, or else an empty string."""
        gpu = self.accelerator(device)
        if gpu is None or gpu.capability is None or gpu.rocm or not self.cuda_architectures:
            return ""
        major, minor = gpu.capability
        for built in filter(None, map(_ARCHITECTURE.fullmatch, self.cuda_architectures)):
            at_least = int(built[2]), int(built[3])
            if at_least <= gpu.capability and (built[1] == "compute" or at_least[0] == major):
                return ""
        says = f"torch {self.torch} has no kernels for {gpu.name} (sm_{major}{minor})"
        index = _OLD_GPUS if (major, minor) < (7, 5) else _NEW_GPUS if major >= 10 else ""
        has = f"torch=={self.torch.partition('+')[0]} from PyTorch's index {index} has"
        return f"{says}; {has}" if index else says

    @classmethod
    def current(cls) -> Hardware:
        """Return the machine set by SPEEDKIT_HARDWARE, or this machine. Raises ConfigError."""
        word = os.environ.get(machines.VARIABLE, "").strip()
        if not word:
            return cls.detect()
        try:
            hardware = cls.from_json(machines.find(word))
        except ConfigError as error:
            raise ConfigError(f"{machines.VARIABLE}: {line}" for line in error.problems) from None
        hardware._pinned = Path(word).stem
        return hardware

    @classmethod
    def detect(cls) -> Hardware:
        """Return this machine; SPEEDKIT_HARDWARE is ignored. Initializes CUDA, if available."""
        import torch

        cpu, system = _detect_cpu(), platform.system()
        found = tuple(
            Accelerator(kind=kind.name, **{"name": cpu.name, **fields})
            for kind in devices.KINDS.values()
            if kind.module.is_available()
            for fields in kind.detect()
        )
        return cls(
            system=system if system in ("Windows", "Darwin") else "Linux",  # type: ignore[arg-type]
            python=platform.python_version(),
            torch=torch.__version__,
            cpu=cpu,
            accelerators=found,
            cxx=cxx_compiler(),
            triton=has_triton(),
            cuda_architectures=tuple(torch.cuda.get_arch_list()),
        )

    def with_gemm(self, patience_s: float = gemm_rates.PATIENCE_S) -> Hardware:
        """Return a copy with GEMM rates, measured if necessary; a pinned machine returns itself."""
        if self.cpu.gemm is not None or self.pinned:
            return self
        rates = gemm_rates.measured(_place(self.cpu), self.cpu.usable_cores, patience_s)
        return self.model_copy(update={"cpu": self.cpu.model_copy(update={"gemm": rates})})

    @classmethod
    @hide_internal_frames
    def from_json(cls, source: str | os.PathLike[str]) -> Hardware:
        """Load a machine from a JSON file, JSON text or a profile's name. Raises ConfigError."""
        text, name = str(arguments.path("source", source)), "JSON text"
        try:
            if not text.lstrip().startswith("{"):
                name, text = text, arguments.file_text(machines.find(text))
            return cls.model_validate_json(text)
        except pydantic.ValidationError as error:
            found = ((".".join(map(str, one["loc"])), one["msg"]) for one in error.errors())
            raise ConfigError(f"{name}: {': '.join(filter(None, one))}" for one in found) from None
        except (OSError, ValueError) as error:
            raise ConfigError([f"{name}: {arguments.why(error)}"]) from None

    def to_json(self) -> str:
        """Return JSON text from which `from_json` restores all fields."""
        return self.model_dump_json(indent=2)


# --- this machine: the processor and its memory ---


def _detect_cpu() -> Cpu:
    import joblib
    import torch

    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    cpu = Cpu(
        name=cpu_name(capabilities),
        architecture=platform.machine() or "unknown",
        logical_cores=os.cpu_count() or 1,
        usable_cores=joblib.cpu_count(),  # within affinity and cgroup quotas (v1, v2)
        memory_bytes=host_memory().total,
        features=cpu_features(capabilities),
    )
    return cpu.model_copy(update={"gemm": gemm_rates.known(_place(cpu))})


def _place(cpu: Cpu) -> str:
    import torch

    return f"{cpu.name} · {cpu.usable_cores} · {torch.__version__}"


def host_memory() -> Any:
    """Return psutil's record of this computer's memory: `total` and `available` bytes."""
    import psutil

    return psutil.virtual_memory()


def cpu_features(capabilities: dict[str, object]) -> tuple[str, ...]:
    """Return the CPU's instruction sets that plans use, from `capabilities` or /proc/cpuinfo."""
    known = dict(capabilities or dict.fromkeys(_in_cpuinfo("(?:flags|Features)").split(), True))
    known["avx512_f"] = known.get("avx512_f") or known.get("avx512f")
    known["arm_bf16"] = known.get("arm_bf16") or known.get("bf16")
    every = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16", "arm_bf16")
    return tuple(feature for feature in every if known.get(feature))


def instruction_sets() -> str:
    """Return all of the processor's instruction sets, as Linux lists them; empty elsewhere."""
    return " ".join(sorted(_in_cpuinfo("(?:flags|Features)").split()))


def cpu_name(capabilities: dict[str, object]) -> str:
    """Return the processor's name from torch, Linux or Python; else `unknown`."""
    name = str(capabilities.get("cpu_name") or "") or _in_cpuinfo("model name")
    return name.strip() or platform.processor() or "unknown"


def _in_cpuinfo(key: str) -> str:
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    match = re.search(rf"^{key}\s*:\s*(.+)", text, re.MULTILINE)
    return match.group(1) if match else ""


# --- this environment: compiler, Triton, libraries ---


def cxx_compiler() -> str | None:
    """Return the path of Inductor's C++ compiler (CXX or the platform's usual one), or None."""
    usual = {"Windows": "cl", "Darwin": "clang++"}.get(platform.system(), "g++")
    return shutil.which(os.environ.get("CXX") or usual)


def has_triton() -> bool:
    """Return whether Triton can be imported; a mere folder with that name does not count."""
    with suppress(Exception):  # the user's import hooks may raise anything
        spec = find_spec("triton")
        return spec is not None and spec.origin is not None
    return False


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the named libraries that are installed, without importing them."""
    versions = {}
    for name in names:
        with suppress(Exception):  # not installed, or one of the user's import hooks raises
            versions[name] = version(name)
    return versions
