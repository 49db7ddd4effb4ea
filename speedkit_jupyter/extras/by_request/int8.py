"""Linear layers in 8-bit integers."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch

from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.extras.by_request.quantization import Quantization
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.torchglue import private as torch_private

INT8 = {"dynamic": "Int8DynamicActivationInt8WeightConfig", "weights": "Int8WeightOnlyConfig"}


class Int8(Quantization):
    """Use 8-bit integers in inference: `dynamic` rounds weights and inputs, `weights` weights."""

    name = "int8"
    summary = "linear layers in 8-bit integers, by torchao"
    helps = "inference with large linear layers; `weights` for single rows"
    risk = "outputs change by about 1 %; small layers get slower"
    bare = "dynamic"
    since, units = (7, 5), "products of 8-bit integers (`int8: weights` does without them)"
    early = ("weights",)
    Options = Literal["auto", False, "dynamic", "weights"]

    def missing_units(self, value: Any, hardware: Hardware, facts: Facts) -> str:
        needs_none = value != "dynamic" or facts.device_type == "cpu"
        return "" if needs_none else super().missing_units(value, hardware, facts)

    def config(self, value: Any, device: torch.device) -> tuple[str, dict[str, Any]]:
        """Return the config, with 7 bits where sums of 8-bit products would overflow."""
        arguments: dict[str, Any] = {"set_inductor_config": False}
        if value == "dynamic" and device.type == "cpu" and overflows():
            arguments["reduce_range"] = True
        return INT8[value], arguments


@cache
def overflows() -> bool:
    """Return whether 8-bit products overflow on this CPU: without VNNI, sums saturate."""
    most = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((torch_private.int8_product(most, most.t()) != 127 * 127 * 64).any())
