"""What a machine offers: detected here, or loaded from JSON to plan for another one."""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    PrivateAttr,
    ValidationError,
)
from pydantic_core import ErrorDetails

from speedkit_jupyter import machines
from speedkit_jupyter.machines import devices, gemm_rates, probes
from speedkit_jupyter.machines.gemm_rates import GemmRates
from speedkit_jupyter.support import arguments, reading
from speedkit_jupyter.support.exceptions import ConfigError, did_you_mean, printable

# Chips of compute capability 7.5 that were made without Tensor Cores (TU116 and TU117); source:
# NVIDIA's "Turing" product pages.
_NO_TENSOR_CORES = re.compile(
    r"GTX 16\d\d|MX4[35]0|MX550|\bT(400|500|550|600|1000|1200)\b|Quadro T(400|600|1000|1200|2000)"
)
# AMD architectures with bf16 matrix instructions; source: AMD's ROCm hardware specifications.
_ROCM_BF16 = re.compile(r"gfx(908|90a|94|95|11|12)")

# Well-kept libraries that an optimization calls where they are installed, by their names on PyPI.
OPTIONAL = ("torchao", "liger-kernel", "flash-attn-3", "flash-attn-4")

Shown = Annotated[str, AfterValidator(printable)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Cpu(_Record):
    """The processor, as this process may use it: `usable_cores` respects affinity and quotas.

    `gemm` are the rates of its engines for float32 products, where they were measured.
    """

    name: Shown = "unknown"
    architecture: Shown = "x86_64"
    logical_cores: PositiveInt = 1
    usable_cores: PositiveInt = 1
    memory_bytes: NonNegativeInt = 0
    features: tuple[str, ...] = ()
    gemm: GemmRates | None = None

    @property
    def bf16(self) -> bool:
        """Whether it multiplies bf16 in hardware."""
        return bool({"avx512_bf16", "amx_bf16", "arm_bf16"} & set(self.features))


class Accelerator(_Record):
    """One GPU. `capability` is NVIDIA's compute capability, `rocm` AMD's architecture name."""

    kind: devices.Name
    name: Shown = "unknown"
    capability: tuple[NonNegativeInt, NonNegativeInt] | None = None
    rocm: Shown | None = None
    memory_bytes: NonNegativeInt = 0
    multiprocessors: NonNegativeInt = 0
    bf16_reported: bool = False

    @property
    def is_nvidia(self) -> bool:
        """Whether NVIDIA's compute capability says what it can do."""
        return self.rocm is None and self.capability is not None

    @property
    def tensor_cores(self) -> bool:
        """Whether it has NVIDIA Tensor Cores (7.0 and later, save the GTX 16 family)."""
        new = self.is_nvidia and self.capability is not None and self.capability >= (7, 0)
        return new and not _NO_TENSOR_CORES.search(self.name)

    @property
    def bf16(self) -> bool:
        """Whether bf16 runs in hardware; torch's own answer counts emulation on NVIDIA."""
        if self.rocm is not None:
            return bool(_ROCM_BF16.match(self.rocm))
        if self.capability is not None:
            return self.capability >= (8, 0)
        return self.bf16_reported

    @property
    def tf32(self) -> bool:
        """Whether it multiplies float32 matrices in TF32 (NVIDIA, 8.0 and later)."""
        return self.is_nvidia and self.bf16


class Hardware(_Record):
    """A machine: processor, accelerators with what links them, and what torch.compile needs.

    `cxx` is the C++ compiler that Inductor would call, or None where none is found. `libraries` are
    the optional ones that are installed, with their versions, by their names on PyPI; where nothing
    is said of them, those of this environment.
    """

    system: Literal["Linux", "Windows", "Darwin"] = "Linux"
    python: str = "3.12"
    torch: str = "2.13.0"
    cpu: Cpu = Cpu()
    accelerators: tuple[Accelerator, ...] = ()
    links: Literal["", "NVLink", "PCIe"] = ""
    cxx: str | None = None
    triton: bool = False
    libraries: dict[str, Shown] = Field(default_factory=lambda: probes.installed(OPTIONAL))
    _pinned: str = PrivateAttr("")

    @property
    def pinned(self) -> str:
        """The name under which SPEEDKIT_HARDWARE chose it; empty where nothing did."""
        return self._pinned

    def accelerator(self, device: str) -> Accelerator | None:
        """Return what a device string ("cuda", "cuda:1", "mps") names, if it is here."""
        kind, _, index = device.partition(":")
        those = [accelerator for accelerator in self.accelerators if accelerator.kind == kind]
        return dict(enumerate(those)).get(int(index or 0))

    @classmethod
    def current(cls) -> Hardware:
        """Return what SPEEDKIT_HARDWARE names, or else this machine; raises ConfigError."""
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
        """Read this machine, whatever plans are made for; makes no CUDA context."""
        import torch

        cpu, system = _detect_cpu(), platform.system()
        found = tuple(
            Accelerator(kind=kind.name, **{"name": cpu.name, **fields})
            for kind in devices.KINDS.values()
            for fields in kind.detect()
        )
        return cls(
            system=system if system in ("Windows", "Darwin") else "Linux",  # type: ignore[arg-type]
            python=platform.python_version(),
            torch=torch.__version__,
            cpu=cpu,
            accelerators=found,
            links=probes.gpu_links() if len(found) > 1 else "",  # type: ignore[arg-type]
            cxx=probes.cxx(),
            triton=probes.has_triton(),
        )

    def with_gemm(self, patience_s: float = gemm_rates.PATIENCE_S) -> Hardware:
        """Return the same with the rates of its engines, measured now where unknown (about 2 s).

        Only for this machine. What takes longer than `patience_s` seconds has failed.
        """
        if self.cpu.gemm is not None or self.pinned:
            return self
        rates = gemm_rates.measured(_place(self.cpu), self.cpu.usable_cores, patience_s)
        return self.model_copy(update={"cpu": self.cpu.model_copy(update={"gemm": rates})})

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> Hardware:
        """Load a machine from a JSON file, by the name of one that ships, or from JSON text.

        Raises ConfigError, which names the file and every wrong key.
        """
        text, name = str(arguments.path("source", source)), "JSON text"
        if not text.lstrip().startswith("{"):
            name, file = text, machines.find(text)
            try:
                text = reading.text(file)
            except (OSError, ValueError) as error:
                raise ConfigError([f"{name}: {reading.why(error)}"]) from None
        try:
            return cls.model_validate(json.loads(text))
        except json.JSONDecodeError as error:
            raise ConfigError([f"{name}, line {error.lineno}: {error.msg}"]) from None
        except ValidationError as error:
            raise ConfigError(f"{name}: {_problem(one)}" for one in error.errors()) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError([f"{name}: {reading.why(error)}"]) from None

    def to_json(self) -> str:
        """Return JSON text that `from_json` loads without loss."""
        return self.model_dump_json(indent=2)


def _problem(detail: ErrorDetails) -> str:
    """Return the key's path, and what is wrong there; for a wrong key the nearest right one."""
    path = detail["loc"]
    where = ".".join(map(str, path))[:80] or "a machine"
    if detail["type"] != "extra_forbidden":
        return f"{where}: {detail['msg']}"
    records: dict[str, type[_Record]] = {"cpu": Cpu, "accelerators": Accelerator}
    fields = records.get(str(path[0]), Hardware).model_fields
    return f"{where}: unknown key; allowed: {', '.join(fields)}.{did_you_mean(path[-1], fields)}"


def _detect_cpu() -> Cpu:
    import loky
    import psutil
    import torch

    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    cpu = Cpu(
        name=probes.cpu_name(capabilities),
        architecture=platform.machine() or "unknown",
        logical_cores=os.cpu_count() or 1,
        usable_cores=loky.cpu_count(),  # affinity, cgroup v1 and v2 quotas
        memory_bytes=psutil.virtual_memory().total,
        features=probes.features(capabilities),
    )
    return cpu.model_copy(update={"gemm": gemm_rates.known(_place(cpu))})


def _place(cpu: Cpu) -> str:
    import torch

    held_back = (os.environ.get(variable, "") for variable in gemm_rates.VARIABLES)
    parts = (cpu.name, str(cpu.usable_cores), torch.__version__, *held_back)
    return " · ".join(filter(None, parts))
