"""Linear layers whose weights are 4-bit integers, by torchao."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Switch
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.twins import quantizing
from speedkit_jupyter.optimizations.twins.compression import for_good, older_than
from speedkit_jupyter.optimizations.twins.quantization import Quantization

if TYPE_CHECKING:
    import torch

# The first compute capability that torch's own kernel for it (tinygemm) is made for.
SINCE = (8, 0)
# So many weights of a row have a scale of their own, and torchao takes rows of whole groups only.
GROUP = 128
CODE = f"""\
for module in model.modules():
    if type(module) is torch.nn.Linear and module.in_features % {GROUP} == 0:
        module.weight = torch.nn.Parameter(module.weight.bfloat16())
quantize_(
    model,
    Int4WeightOnlyConfig(
        group_size={GROUP},
        int4_packing_format="tile_packed_to_4d",
        set_inductor_config=False,
    ),
    filter_fn=lambda module, name: type(module) is torch.nn.Linear
    and module.in_features % {GROUP} == 0,
)"""


class Int4(Quantization):
    """For inference: a weight is a sixteenth of its group's range, and what comes in is bf16."""

    name = "int4"
    summary = "linear layers with weights of 4 bits, by torchao"
    helps = "inference that waits for memory: language models that write one token after another"
    risk = "another model, by several percent of its outputs; slower for large batches"
    page = (
        "https://docs.pytorch.org/ao/stable/api_reference/generated/torchao.quantization."
        "Int4WeightOnlyConfig.html"
    )
    multiples = (1, GROUP)
    Options = Annotated[Switch, Field(description="auto, true, false")]

    def missing_units(self, value: Any, hardware: Hardware, facts: Facts) -> str:
        """torch's kernel is for bf16 Tensor Cores."""
        has = older_than(SINCE, hardware, facts)
        return has and f"torch's kernel for 4 bits needs compute capability 8.0; {has}"

    def maker(self, decision: Decision, target: Target) -> Callable[[Any], Any]:
        """Packed twins."""
        config = quantizing.imported().Int4WeightOnlyConfig(
            group_size=GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
        )

        def make(weight: torch.Tensor) -> torch.Tensor:
            return quantizing.by_torchao(config, weight.bfloat16())

        return make

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """torchao's own call, which replaces the weights for good."""
        return Snippet(
            for_good(decision),
            imports=("from torchao.quantization import Int4WeightOnlyConfig, quantize_",),
            model=tuple(CODE.splitlines()),
        )
