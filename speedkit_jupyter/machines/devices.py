"""What each kind of device can do: the one table that all ask, and where a new kind is entered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

# The kinds of accelerator; a machine's record takes these words.
Name = Literal["cuda", "mps", "xpu"]
Fields = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of accelerator, by torch's word for it.

    `detect` gives the fields of `hardware.Accelerator` for each that is here (one without a name
    has the processor's). `is_numbered`:
    there may be several (`cuda:1`). `has_fused`: torch's fused optimizers have kernels for it.
    `has_triton`: torch.compile writes Triton for it. `in_fabric`: Lightning Fabric knows the word.
    """

    name: Name
    detect: Callable[[], list[Fields]]
    is_numbered: bool = True
    has_fused: bool = True
    has_triton: bool = True
    in_fabric: bool = True

    @property
    def module(self) -> Any:
        """`torch.cuda` and its likes; None where this torch has none."""
        import torch

        return getattr(torch, self.name, None)

    def is_in_use(self) -> bool:
        """Whether this process has begun to use one; asking begins nothing."""
        module = self.module
        if module is None:
            return False
        begun = getattr(module, "is_initialized", None) or module.is_available
        return bool(begun())

    def generators(self) -> tuple[Callable[[], Any], Callable[[Any], object]]:
        """Reads and writes the states of all its random generators."""
        module = self.module
        if hasattr(module, "get_rng_state_all"):
            return module.get_rng_state_all, module.set_rng_state_all
        return module.get_rng_state, module.set_rng_state


def _cuda() -> list[Fields]:
    """NVIDIA's, and AMD's by ROCm."""
    import torch

    if not torch.cuda.is_available():
        return []
    records = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rocm = getattr(properties, "gcnArchName", None) if torch.version.hip else None
        records.append(
            {
                "name": properties.name,
                "capability": (properties.major, properties.minor),
                "rocm": rocm,
                "memory_bytes": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return records


def _mps() -> list[Fields]:
    """Apple's; the processor's name is its own."""
    import torch

    if not torch.backends.mps.is_available():
        return []
    return [
        {
            "memory_bytes": torch.mps.recommended_max_memory(),
            "bf16_reported": torch.backends.mps.is_macos_or_newer(14, 0),
        }
    ]


def _xpu() -> list[Fields]:
    """Intel's."""
    import torch

    if not hasattr(torch, "xpu") or not torch.xpu.is_available():
        return []
    return [
        {
            "name": torch.xpu.get_device_properties(index).name,
            "memory_bytes": torch.xpu.get_device_properties(index).total_memory,
            "bf16_reported": torch.xpu.is_bf16_supported(including_emulation=False),
        }
        for index in range(torch.xpu.device_count())
    ]


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("cuda", _cuda),
        Kind("mps", _mps, is_numbered=False, has_triton=False),
        Kind("xpu", _xpu, in_fabric=False),
    )
}


def kind_of(device: str) -> Kind | None:
    """Of `cuda:1`, say; None for the CPU and for what is not entered here."""
    return KINDS.get(device.partition(":")[0])


def in_use() -> list[Kind]:
    """Those that this process has begun to use."""
    return [kind for kind in KINDS.values() if kind.is_in_use()]


def words() -> str:
    """What a device may be called, for help and errors: `cpu, cuda, cuda:N, mps`."""
    names = ["cpu"]
    for kind in KINDS.values():
        names += [kind.name, f"{kind.name}:N"] if kind.is_numbered else [kind.name]
    return ", ".join(names)


def pattern() -> str:
    """Of every word for a device."""
    numbers = {kind.name: "(:[0-9]{1,3})?" if kind.is_numbered else "" for kind in KINDS.values()}
    return "|".join(["cpu", *(f"{name}{number}" for name, number in numbers.items())])


def synchronize(device: torch.device) -> None:
    """Wait until it has finished everything that was asked of it; a CPU has already."""
    if device.type == "cpu":
        return
    import torch

    torch.get_device_module(device).synchronize(*_numbered(device))


def release_cached() -> None:
    """Give back to the driver what torch's allocators keep for later."""
    for kind in in_use():
        kind.module.empty_cache()


def _numbered(device: torch.device) -> tuple[torch.device, ...]:
    kind = KINDS.get(device.type)
    return (device,) if kind is not None and kind.is_numbered else ()
