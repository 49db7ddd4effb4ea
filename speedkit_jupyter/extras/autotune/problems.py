"""What Inductor chooses a kernel for, as plain values that are the same in every process."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import torch
from pydantic import Field

from speedkit_jupyter.machines import probes
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue import inductor as torch_private

# A library's kernel, by Inductor's name for it: the operation, and which input is the left matrix.
LIBRARY = {
    "mm": ("mm", 0),
    "addmm": ("addmm", 1),
    "bias_addmm": ("addmm", 1),
    "bmm": ("bmm", 0),
    "baddbmm": ("baddbmm", 1),
    torch_private.MKL_KERNEL: ("linear", 0),
    torch_private.ONEDNN_KERNEL: ("linear", 0),
}
# What the store may hold of numbers; sizes beyond are none of a tensor's.
Size = Annotated[int, Field(gt=0, lt=2**40)]
Milliseconds = Annotated[float, Field(gt=1e-9, lt=1e9)]
# Inductor counts the kernels that it generates: `triton_mm_12`.
COUNT = re.compile(r"_\d+$")


@dataclass(frozen=True)
class DeviceName:
    """A GPU with its multiprocessors, or a CPU with torch's threads (`units`)."""

    name: str
    units: Size

    @property
    def model(self) -> str:
        """Return the name of the model that is learned from its timings."""
        return "-".join([*re.split(r"[^\w.]+", self.name), "matmul"])


@dataclass(frozen=True)
class Input:
    """One operand: sizes and strides in elements."""

    sizes: Annotated[tuple[Size, ...], Field(min_length=1)]
    strides: Annotated[tuple[int, ...], Field(min_length=1)]
    dtype: str


@dataclass(frozen=True)
class Problem:
    """One matrix product on one device. `left` says which input is the left matrix."""

    op: str
    left: Annotated[int, Field(ge=0)]
    inputs: tuple[Input, ...]
    output: Annotated[tuple[Size, ...], Field(min_length=2)]
    precision: str
    versions: str
    device: DeviceName

    @property
    def key(self) -> str:
        """Return what a recorded search is found by."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the batch and M, N, K."""
        *batch, m, n = self.output
        return math.prod(batch), m, n, self.inputs[self.left].sizes[-1]


@dataclass(frozen=True)
class KernelSearch:
    """What Inductor measured: milliseconds of the kernels that it timed, among all on offer."""

    problem: Problem
    offered: tuple[str, ...]
    timings: Mapping[str, Milliseconds]
    seconds: float

    def __post_init__(self) -> None:
        if not self.timings or self.problem.left >= len(self.problem.inputs):
            raise ValueError("a search has a left matrix, and the time of one kernel at least")

    @property
    def is_whole(self) -> bool:
        """Whether more kernels were timed than a prediction leaves."""
        return len(self.timings) * 2 > len(self.offered)

    def slower(self, failed: float) -> list[float]:
        """Return how many times slower than the fastest each kernel on offer is; `failed` for
        those that could not run.
        """
        best = min(self.timings.values())
        return [self.timings.get(one, failed * best) / best for one in self.offered]


def label(choice: Any) -> str:
    """Return a kernel's name and configuration without Inductor's running numbers."""
    return f"{COUNT.sub('', choice.name)}({choice.description})"


def problem_of(choices: Sequence[Any]) -> Problem | None:
    """Return the product that these kernels compute; None for another operation, one whose shape
    changes from call to call, or one without a library's kernel.
    """
    known = [one for one in choices if torch_private.is_library_kernel(one) and one.name in LIBRARY]
    if not known or len({*map(label, choices)}) < len(choices):
        return None
    op, left = LIBRARY[known[0].name]
    nodes, layout = known[0].input_nodes, known[0].layout
    sides = [(node.get_size(), node.get_stride(), str(node.get_dtype())) for node in nodes]
    output = [*layout.size]
    numbers = [*output, *(one for sizes, strides, _ in sides for one in (*sizes, *strides))]
    if not all(isinstance(one, int) or one.is_number for one in numbers) or len(output) < 2:
        return None
    inputs = tuple(
        Input(tuple(map(int, sizes)), tuple(map(int, strides)), dtype.removeprefix("torch."))
        for sizes, strides, dtype in sides
    )
    precision = torch.get_float32_matmul_precision()  # decides between TF32 and not
    shape, device = tuple(map(int, output)), device_of(layout.device)
    return Problem(op, left, inputs, shape, precision, versions(), device)


def device_of(device: Any = None) -> DeviceName:
    """Return what stands behind a torch.device; without one, that of the first GPU or the CPU."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return DeviceName(properties.name, properties.multi_processor_count)
    if device.type != "cpu":
        return DeviceName(device.type, 1)
    name = probes.cpu_name(getattr(torch.cpu, "get_capabilities", dict)())
    threads = torch.get_num_threads()
    return DeviceName(f"{name} {count(threads, 'thread')}", threads)


def versions() -> str:
    """Return the versions of torch and Triton: timings of others say nothing here."""
    triton = import_module("triton") if find_spec("triton") else None
    more = f", Triton {getattr(triton, '__version__', '')}" if triton else ""
    return f"torch {torch.__version__}{more}"
