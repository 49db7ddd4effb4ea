"""Linear layers in microscaling formats, by torchao."""

from __future__ import annotations

from typing import Any, Literal

import torch

from speedkit_jupyter.catalog.base.compression import FUSED, INFERENCE, Compression
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines.hardware import Hardware

# torch's dtypes of the elements. NVFP4 is left out: torchao 0.18 turns a tensor of zeros into NaN.
ELEMENTS = {"mxfp8": "float8_e4m3fn", "mxfp4": "float4_e2m1fn_x2"}


class Mx(Compression):
    """For inference: each 32 numbers share a scale, in weights and inputs. The model has to be
    bfloat16 or run under autocast.
    """

    name = "mx"
    summary = "linear layers in microscaling formats (MXFP8, MXFP4), by torchao"
    helps = "inference with large linear layers on Blackwell, compiled"
    risk = "another model: its outputs are off by some 4 % in `mxfp8`, 17 % in `mxfp4`"
    bare = "mxfp8"
    multiples, casts = (32, 32), True
    hint = f"{INFERENCE}; {FUSED}"
    since, units = (10, 0), "microscaling Tensor Cores (Blackwell's)"
    Options = Literal["auto", False, "mxfp8", "mxfp4"]

    def missing_units(self, value: Any, hardware: Hardware, facts: Facts) -> str:
        if facts.precision != "bf16" and "bfloat16" not in facts.dtypes:
            return "its products are bfloat16: ask for precision: bf16, too"
        return super().missing_units(value, hardware, facts)

    def config(self, value: Any, device: torch.device) -> tuple[str, str, dict[str, Any]]:
        dtype = getattr(torch, ELEMENTS[value])
        arguments = {"activation_dtype": dtype, "weight_dtype": dtype}
        return "prototype.mx_formats", "MXDynamicActivationMXWeightConfig", arguments
