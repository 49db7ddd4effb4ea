"""Linear layers that multiply in 8-bit integers, by torchao."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.compression import (
    Compression,
    by_torchao,
    for_good,
    own_weight,
    torchao,
    true_is,
)
from speedkit_jupyter.optimizations.base.decision import Decision
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet, call
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts

if TYPE_CHECKING:
    import torch

OVERFLOWS = "without VNNI products of 8-bit integers may overflow on this CPU, so 7 bits are used"
CONFIGS = {
    "dynamic": "Int8DynamicActivationInt8WeightConfig",
    "weights": "Int8WeightOnlyConfig",
}


class Int8(Compression):
    """For inference. `dynamic` rounds what comes in as well, row by row, and multiplies integers;
    `weights` rounds only the weights, for products that wait for memory.
    """

    name = "int8"
    summary = "linear layers in 8-bit integers, by torchao"
    helps = "inference with large linear layers; `weights` for single rows"
    risk = "another model, by about 1 % of its outputs; small layers lose"
    page = "https://docs.pytorch.org/ao/stable/"
    bare = "dynamic"
    since, units = (7, 5), "products of 8-bit integers (`int8: weights` does without them)"
    Options = Annotated[
        Literal["auto", False, "dynamic", "weights"],
        true_is(bare),
        Field(description="auto, false, dynamic, weights"),
    ]

    def missing_units(self, value: Any, hardware: Hardware, facts: Facts) -> str:
        """On CPUs and for weights alone there is nothing to miss."""
        if value != "dynamic" or facts.device_type == "cpu":
            return ""
        return super().missing_units(value, hardware, facts)

    def made(self, decision: Decision, target: Target, layer: torch.nn.Linear) -> Any:
        """A weight of integers."""
        more: dict[str, Any] = {}
        if decision.value == "dynamic" and _has_to_be_narrow(own_weight(layer).device):
            target.notes[self.name], more["reduce_range"] = OVERFLOWS, True
        config = getattr(torchao(), CONFIGS[decision.value])
        return by_torchao(config(set_inductor_config=False, **more), own_weight(layer))

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
    """As torchao says of this device, or as its products show."""
    narrow = torchao("utils").should_reduce_range(device)
    return bool(narrow) or (device.type == "cpu" and _overflows())


@cache
def _overflows() -> bool:
    """Whether products of integers are wrong on this CPU: without VNNI sums of two saturate."""
    import torch

    most = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(most, most.t()) != 127 * 127 * 64).any())
