"""Linear layers in microscaling formats, by torchao."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.autocast import autocast_source
from speedkit_jupyter.optimizations.base.compression import (
    FUSED,
    Compression,
    by_torchao,
    for_good,
    own_weight,
    torchao,
    true_is,
)
from speedkit_jupyter.optimizations.base.decision import Decision
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts

if TYPE_CHECKING:
    import torch

# torch's words for the numbers of a block, which share a scale. NVFP4 is not among them: torchao
# 0.18 makes NaN of a tensor of zeros.
ELEMENTS = {"mxfp8": "float8_e4m3fn", "mxfp4": "float4_e2m1fn_x2"}
CODE = """\
for module in model.modules():
    if type(module) is torch.nn.Linear and not any(n % 32 for n in module.weight.shape):
        module.weight = torch.nn.Parameter(module.weight.bfloat16())
quantize_(
    model,
    MXDynamicActivationMXWeightConfig(
        activation_dtype={dtype},
        weight_dtype={dtype},
    ),
    filter_fn=lambda module, name: type(module) is torch.nn.Linear
    and not any(n % 32 for n in module.weight.shape),
)"""


class Mx(Compression):
    """For inference: blocks of 32 numbers share a scale, in weights and in what comes in.

    Its products are bfloat16, so that the model has to be, or runs under autocast.
    """

    name = "mx"
    summary = "linear layers in microscaling formats (MXFP8, MXFP4), by torchao"
    helps = "inference with large linear layers on Blackwell, compiled"
    risk = "another model: its outputs are off by some 4 % in `mxfp8`, 17 % in `mxfp4`"
    page = "https://docs.pytorch.org/ao/stable/"
    bare = "mxfp8"
    multiples = (32, 32)
    hint = FUSED
    since, units = (10, 0), "microscaling Tensor Cores (Blackwell's)"
    Options = Annotated[
        Literal["auto", False, "mxfp8", "mxfp4"],
        true_is(bare),
        Field(description="auto, false, mxfp8, mxfp4"),
    ]

    def missing_units(self, value: Any, hardware: Hardware, facts: Facts) -> str:
        """Blackwell's Tensor Cores, and a model that takes bfloat16."""
        if facts.precision != "bf16" and "bfloat16" not in facts.dtypes:
            return "its products are bfloat16: ask for precision: bf16, too"
        return super().missing_units(value, hardware, facts)

    def made(self, decision: Decision, target: Target, layer: torch.nn.Linear) -> Any:
        """A weight of blocks."""
        import torch

        dtype = getattr(torch, ELEMENTS[decision.value])
        formats = torchao("prototype.mx_formats")
        config = formats.MXDynamicActivationMXWeightConfig(
            activation_dtype=dtype, weight_dtype=dtype
        )
        return by_torchao(config, own_weight(layer).bfloat16().contiguous())

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """torchao's own call, which replaces the weights for good, in autocast where the rest of
        the model would not take the bfloat16 that comes out.
        """
        around = Snippet()
        if facts.precision != "bf16" and facts.dtypes != ("bfloat16",):
            around = autocast_source("bf16", facts.device_type, form)
        return replace(
            around,
            comment=for_good(decision),
            imports=(
                "from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig",
                "from torchao.quantization import quantize_",
            ),
            model=tuple(CODE.format(dtype=f"torch.{ELEMENTS[decision.value]}").splitlines()),
        )
