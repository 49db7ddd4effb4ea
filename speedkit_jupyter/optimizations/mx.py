"""Linear layers in microscaling formats, by torchao."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.autocast.autocast_source import autocast_source
from speedkit_jupyter.optimizations.base.decision import Decision
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.twins import quantizing
from speedkit_jupyter.optimizations.twins.compression import for_good, older_than
from speedkit_jupyter.optimizations.twins.quantization import FUSED, Quantization, true_is

if TYPE_CHECKING:
    import torch

# The first compute capability whose Tensor Cores multiply them: Blackwell's.
SINCE = (10, 0)
# MXFP4 is CUTLASS's (cuBLAS has MXFP8), and torch builds that for compute capability 10 alone.
MXFP4_UNTIL = (11, 0)
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


class Mx(Quantization):
    """For inference: blocks of 32 numbers share a scale, in weights and in what comes in.

    The products come in bfloat16, and go on in the dtype that they would have had.
    """

    name = "mx"
    summary = "linear layers in microscaling formats (MXFP8, MXFP4), by torchao"
    helps = "inference with large linear layers on Blackwell, compiled"
    risk = (
        "another model: its outputs are off by some 4 % in `mxfp8`, 17 % in `mxfp4`; a prototype "
        "of torchao's; slower where nothing fuses the casts, which `compile` does"
    )
    page = (
        "https://docs.pytorch.org/ao/stable/api_reference/generated/torchao.prototype.mx_formats."
        "MXDynamicActivationMXWeightConfig.html"
    )
    bare = "mxfp8"  # which loses least
    multiples = (32, 32)
    casts = True
    hint = FUSED
    Options = Annotated[
        Literal["auto", False, "mxfp8", "mxfp4"],
        true_is(bare),
        Field(description="auto, false, mxfp8, mxfp4"),
    ]

    def missing_units(self, value: Any, hardware: Hardware, facts: Facts) -> str:
        """Blackwell's Tensor Cores multiply them; MXFP4 those of its servers alone."""
        if has := older_than(SINCE, hardware, facts):
            return f"it needs Blackwell's Tensor Cores (compute capability 10.0); {has}"
        gpu = hardware.accelerator(facts.device)
        if value == "mxfp4" and gpu and gpu.capability and gpu.capability >= MXFP4_UNTIL:
            has = ".".join(map(str, gpu.capability))
            return f"MXFP4 needs compute capability 10; {gpu.name} has {has}: mx: mxfp8 is there"
        return ""

    def maker(self, decision: Decision, target: Target) -> Callable[[Any], Any]:
        """Twins of blocks."""

        def make(weight: torch.Tensor) -> torch.Tensor:
            return quantizing.by_torchao(_config(decision.value), weight.bfloat16().contiguous())

        return make

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """torchao's own call, which replaces the weights for good, in autocast where the rest of
        the model would not take the bfloat16 that comes out.
        """
        around, comment = Snippet(), for_good(decision)
        if facts.precision != "bf16" and facts.dtypes != ("bfloat16",):
            around = autocast_source("bf16", facts.device_type, form)
            comment += ", and gives bfloat16: hence autocast"
        return replace(
            around,
            comment=comment,
            imports=(
                "from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig",
                "from torchao.quantization import quantize_",
            ),
            model=tuple(CODE.format(dtype=f"torch.{ELEMENTS[decision.value]}").splitlines()),
        )


def _config(value: str, **more: Any) -> Any:
    """Weights and what comes in alike, which is all that there is."""
    import torch

    dtype = getattr(torch, ELEMENTS[value])
    formats = quantizing.imported("prototype.mx_formats")
    return formats.MXDynamicActivationMXWeightConfig(
        activation_dtype=dtype, weight_dtype=dtype, **more
    )
