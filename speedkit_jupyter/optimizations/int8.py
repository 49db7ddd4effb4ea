"""Linear layers that multiply in 8-bit integers, by torchao."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet, call
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.twins import quantizing
from speedkit_jupyter.optimizations.twins.compression import for_good, older_than
from speedkit_jupyter.optimizations.twins.quantization import Quantization, true_is

if TYPE_CHECKING:
    import torch

# The first compute capability with Tensor Cores for int8.
INTEGER_TENSOR_CORES = (7, 5)
OVERFLOWS = "without VNNI products of 8-bit integers may overflow on this CPU, so 7 bits are used"
CONFIGS = {
    "dynamic": "Int8DynamicActivationInt8WeightConfig",
    "weights": "Int8WeightOnlyConfig",
}


class Int8(Quantization):
    """For inference: the weights stay in the model, and integers multiply in their stead.

    `dynamic` rounds what comes in as well, row by row, and multiplies integers; `weights` rounds
    only the weights, for products that wait for memory.
    """

    name = "int8"
    summary = "linear layers in 8-bit integers, by torchao"
    helps = (
        "`dynamic`: inference with large linear layers, on CPUs with VNNI or AMX too; `weights`: "
        "single rows, where the memory is the limit"
    )
    risk = (
        "another model, by about 1 % of its outputs; small layers lose, since rounding costs each "
        "some tenths of a millisecond; a quarter more memory, since the weights stay"
    )
    page = (
        "https://docs.pytorch.org/ao/stable/api_reference/generated/torchao.quantization."
        "Int8DynamicActivationInt8WeightConfig.html"
    )
    bare = "dynamic"  # which gains more
    Options = Annotated[
        Literal["auto", False, "dynamic", "weights"],
        true_is(bare),
        Field(description="auto, false, dynamic, weights"),
    ]

    def missing_units(self, value: Any, hardware: Hardware, facts: Facts) -> str:
        """Products of integers are torchao's on CPUs and NVIDIA GPUs; weights alone need none."""
        if value != "dynamic" or facts.device_type == "cpu":
            return ""
        has = older_than(INTEGER_TENSOR_CORES, hardware, facts)
        return has and (
            "products of 8-bit integers are torchao's on CPUs, and on NVIDIA GPUs of compute "
            f"capability 7.5 and later with Tensor Cores; {has}: int8: weights is there"
        )

    def maker(self, decision: Decision, target: Target) -> Callable[[Any], Any]:
        """Twins of integers."""
        quantization, notes = quantizing.imported(), target.notes

        def make(weight: torch.Tensor) -> torch.Tensor:
            narrow = decision.value == "dynamic" and _has_to_be_narrow(weight.device)
            if narrow:
                notes["int8"] = OVERFLOWS
            config = getattr(quantization, CONFIGS[decision.value])
            more = {"reduce_range": True} if narrow else {}
            return quantizing.by_torchao(config(set_inductor_config=False, **more), weight)

        return make

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """torchao's own call, which replaces the weights for good."""
        name, imports, more = CONFIGS[decision.value], [], []
        if decision.value == "dynamic" and facts.device_type == "cpu":
            imports.append("from torchao.utils import should_reduce_range")
            more.append('reduce_range=should_reduce_range(torch.device("cpu"))')
        config = call(name, *more, set_inductor_config=False)
        return Snippet(
            for_good(decision),
            imports=(f"from torchao.quantization import {name}, quantize_", *imports),
            model=("quantize_(", "    model,", f"    {config},", ")"),
        )


def _has_to_be_narrow(device: torch.device) -> bool:
    """As torchao says of this CPU, whichever kernel torch takes there, or as its products show."""
    narrow = quantizing.imported("utils").should_reduce_range(device)
    return bool(narrow) or (device.type == "cpu" and _overflows())


@cache
def _overflows() -> bool:
    """Whether products of integers are wrong on this CPU: without VNNI sums of two saturate."""
    import torch

    most = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(most, most.t()) != 127 * 127 * 64).any())
