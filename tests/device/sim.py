"""Add a device "sim" (`pytest -p sim`). It runs on the CPU, asynchronously like a GPU (sim.cpp)."""

import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import pytest
import torch
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from speedkit_jupyter.machines import devices

torch.utils.rename_privateuse1_backend("sim")
_environment = f"{crc32(torch.__file__.encode()):x}_{torch.__version__}"
_built = Path(tempfile.gettempdir(), f"speedkit_sim_{os.getuid()}_{_environment}")
_built.mkdir(exist_ok=True)
(_built / "lock").unlink(missing_ok=True)  # left by a killed run: torch would wait forever
native: Any = cpp_extension.load(
    "speedkit_sim",
    [str(Path(__file__).with_suffix(".cpp"))],
    extra_cflags=["-O1", "-w"],
    build_directory=str(_built),
)


def reset(kernel_s: float = 1e-6, limit: int = 2**30, nap: object = time.sleep) -> None:
    """Set the seconds of a kernel, the memory in bytes, and the function that is called to wait."""
    native.synchronize()
    native.set(nap, kernel_s, limit)


native.set(time.sleep, 1e-6, 2**30)

# torch and its users look up the following names in the module `torch.sim`.
Event, Stream = torch.Event, torch.Stream
set_stream = torch.accelerator.set_stream
current_stream = lambda device=None: torch.accelerator.current_stream(device)  # noqa: E731
synchronize, empty_cache = torch.accelerator.synchronize, native.empty_cache
is_available = is_initialized = lambda: True
_is_in_bad_fork = lambda: False  # noqa: E731
device_count, current_device = lambda: 1, lambda: 0
set_device, device = lambda index: None, lambda index: nullcontext()
get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16, torch.float32]  # noqa: E731
manual_seed = manual_seed_all = lambda seed: native.generator().manual_seed(seed)
get_rng_state = lambda device=None: native.generator().get_state()  # noqa: E731
set_rng_state = lambda state, device=None: native.generator().set_state(state)  # noqa: E731
memory_allocated = lambda device=None: native.memory()[0]  # noqa: E731
max_memory_allocated = lambda device=None: native.memory()[1]  # noqa: E731
memory_reserved = lambda device=None: native.memory()[2]  # noqa: E731
mem_get_info = lambda device=None: (native.memory()[3] - memory_reserved(), native.memory()[3])  # noqa: E731
reset_peak_memory_stats = lambda device=None: native.reset_peak()  # noqa: E731

torch._register_device_module("sim", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


class Graph(TorchDispatchMode):
    """A CUDA graph in Python: a replay repeats the operators and overwrites their first results."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.detach().copy_(new)


@pytest.fixture
def recorded_graphs(monkeypatch):
    """Replace the graph functions of `torch.cuda`, so that they record graphs on this device."""
    from speedkit_jupyter.extras.kernels import graphs

    monkeypatch.setattr(graphs, "KIND", "sim")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: self.device.type == "sim"))
    stands_in = {"CUDAGraph": Graph, "Stream": torch.Stream, "current_stream": current_stream}
    stands_in |= {"graph": lambda graph: graph, "stream": lambda stream: stream, "device": device}
    for name, value in stands_in.items():
        monkeypatch.setattr(torch.cuda, name, value)


# Add the device to the table of devices before other modules use the table.
devices.KINDS["sim"] = devices.Kind(
    "sim",
    lambda: [{"name": "Simulated", "memory_bytes": mem_get_info()[1], "bf16_reported": True}],
    has_triton=False,
)
devices.Name = Literal["cuda", "mps", "xpu", "sim"]
devices.PATTERN += "|sim(:[0-9])?"
