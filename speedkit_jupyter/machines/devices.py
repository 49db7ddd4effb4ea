"""Describe kinds of accelerator, detect their devices, read memory, and record CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

# The kinds of accelerator, as machine profiles name them.
Name = Literal["cuda", "mps", "xpu"]
Fields = dict[str, Any]
# Device types of TPUs and their packages on PyPI. No rule covers TPUs: no TPU was measured.
TPUS = {"xla": "torch-xla", "tpu": "torch-tpu"}


@dataclass(frozen=True)
class Kind:
    """A kind of accelerator, with torch's name for it, such as cuda.

    `detect` returns the fields of each `hardware.Accelerator`, whose name defaults to the CPU's.
    `is_numbered` is true for devices such as `cuda:1`. `not_fused` names optimizers without fused
    kernels. `bf16` and `no_bf16` are the reasons shown for and against bf16.
    """

    name: str
    detect: Callable[[], list[Fields]]
    is_numbered: bool = True
    not_fused: tuple[str, ...] = ()
    has_triton: bool = True
    has_float64: bool = True
    has_attention_kernels: bool = False
    bf16: str = "has bf16 matrix units; whether they pay differs"
    no_bf16: str = "reports no bf16 matrix units"

    @property
    def module(self) -> Any:
        """Return torch's module for this kind, such as `torch.cuda`."""
        import torch

        return getattr(torch, self.name)

    def is_in_use(self) -> bool:
        """Return whether this process has initialized the kind; on MPS, whether it is available."""
        return bool((getattr(self.module, "is_initialized", None) or self.module.is_available)())

    def allocated_bytes(self, device: torch.device | None = None) -> int:
        """Return the bytes of tensors on a device of this kind (default: on all its devices)."""
        if hasattr(self.module, "memory_allocated"):
            every = range(self.module.device_count()) if device is None else [device]
            return sum(int(self.module.memory_allocated(one)) for one in every)
        return int(self.module.current_allocated_memory())  # torch.mps

    def free_bytes(self, device: torch.device) -> int | None:
        """Return the device's free bytes, plus unused bytes in torch's cache; None on MPS."""
        if not hasattr(self.module, "mem_get_info"):
            return None
        cached = self.module.memory_reserved(device) - self.module.memory_allocated(device)
        return int(self.module.mem_get_info(device)[0]) + int(cached)

    def peak_bytes(self, step: Callable[[], object], device: torch.device) -> int | None:
        """Run a step after emptying the cache; return its peak of added bytes, or None on MPS."""
        if not hasattr(self.module, "max_memory_allocated"):
            step()
            return None
        self.module.synchronize(device)
        self.module.empty_cache()
        self.module.reset_peak_memory_stats(device)
        before = self.module.memory_allocated(device)
        step()
        self.module.synchronize(device)
        return int(self.module.max_memory_allocated(device)) - int(before)

    def generators(self) -> tuple[Callable[[], Any], Callable[[Any], object]]:
        """Return functions that read and write the states of all random generators of this kind.

        `state.snapshot.generators` calls them for each kind in use.
        """
        module = self.module
        read = getattr(module, "get_rng_state_all", module.get_rng_state)
        return read, getattr(module, "set_rng_state_all", module.set_rng_state)


def _cuda() -> list[Fields]:
    import torch

    every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        {
            "name": one.name,
            "capability": (one.major, one.minor),
            "rocm": getattr(one, "gcnArchName", None) if torch.version.hip else None,
            "memory_bytes": one.total_memory,
            "multiprocessors": one.multi_processor_count,
        }
        for one in every
    ]


def _mps() -> list[Fields]:
    import torch

    bf16 = torch.backends.mps.is_macos_or_newer(14, 0)
    return [{"memory_bytes": torch.mps.recommended_max_memory(), "bf16_reported": bf16}]


def _xpu() -> list[Fields]:
    import torch

    bf16 = torch.xpu.is_bf16_supported(including_emulation=False)
    every = map(torch.xpu.get_device_properties, range(torch.xpu.device_count()))
    return [
        {"name": one.name, "memory_bytes": one.total_memory, "bf16_reported": bf16} for one in every
    ]


_KINDS = (
    Kind("cuda", _cuda, has_attention_kernels=True),
    Kind(
        "mps",
        _mps,
        is_numbered=False,
        not_fused=("Adagrad",),
        has_triton=False,
        has_float64=False,
        bf16="runs bf16 on macOS 14 and later; whether it pays differs",
        no_bf16="has no bf16: on MPS it needs macOS 14 or later",
    ),
    Kind("xpu", _xpu, not_fused=("Adagrad",)),
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in _KINDS}


def kind_of(device: str) -> Kind | None:
    """Return the kind of a device such as `cuda:1`; None for the CPU and unknown kinds."""
    return KINDS.get(device.partition(":")[0])


def every() -> list[Kind]:
    """Return the kinds in KINDS, and the kind of torch's accelerator if KINDS lacks it (an NPU)."""
    import torch

    found = torch.accelerator.current_accelerator()
    return [*KINDS.values(), *([named(found.type)] if found and found.type not in KINDS else ())]


def named(name: str) -> Kind:
    """Return the kind with this name; a kind that is not in KINDS has the default properties."""
    return KINDS.get(name) or Kind(name, list)


def in_use() -> list[Kind]:
    """Return the kinds that this process has initialized, and MPS if it is available."""
    return [kind for kind in every() if kind.is_in_use()]


# The device names for help and errors, and a regular expression that matches them.
_NUMBERED = {kind.name: ["", ":N"] if kind.is_numbered else [""] for kind in _KINDS}
WORDS = ", ".join(["cpu", *(name + end for name, ends in _NUMBERED.items() for end in ends)])
PATTERN = WORDS.replace(", ", "|").replace(":N", ":[0-9]{1,3}")


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work; return at once for a CPU."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def has_fused(device: str, optimizer: str) -> bool:
    """Return whether fused kernels of `optimizer`, if torch has any, run on a device (`cuda:1`)."""
    kind = kind_of(device)
    return device == "cpu" if kind is None else optimizer not in kind.not_fused


def release_cached() -> None:
    """Give back to the driver the memory that torch's allocators have cached."""
    for kind in in_use():
        kind.module.empty_cache()


def warm_up_graph(call: Callable[[], object], device: torch.device | None = None) -> None:
    """Call `call` three times on another stream, as in torch's notes on CUDA graphs."""
    import torch

    current, other = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    other.wait_stream(current)
    with torch.cuda.stream(other):
        for _ in range(3):
            call()
    current.wait_stream(other)


def recorded_graph(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record a call; return its CUDA graph, and its result, which each replay overwrites."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result
