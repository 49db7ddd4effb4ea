"""Linear layers whose weights are 4-bit integers, by torchao."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from speedkit_jupyter.optimizations.base.compression import (
    Compression,
    by_torchao,
    for_good,
    own_weight,
    torchao,
)
from speedkit_jupyter.optimizations.base.decision import Decision, Switch
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts

if TYPE_CHECKING:
    import torch

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


class Int4(Compression):
    """For inference: a weight is a sixteenth of its group's range, and what comes in is bf16."""

    name = "int4"
    summary = "linear layers with weights of 4 bits, by torchao"
    helps = "inference that waits for memory: language models that write one token after another"
    risk = "another model, by several percent of its outputs; slower for large batches"
    page = "https://docs.pytorch.org/ao/stable/"
    multiples = (1, GROUP)
    since, units = (8, 0), "torch's kernels for 4 bits"
    Options = Annotated[Switch, Field(description="auto, true, false")]

    def made(self, decision: Decision, target: Target, layer: torch.nn.Linear) -> Any:
        """A packed weight."""
        config = torchao().Int4WeightOnlyConfig(
            group_size=GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
        )
        return by_torchao(config, own_weight(layer).bfloat16())

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """torchao's own call, which replaces the weights for good."""
        return Snippet(
            for_good(decision),
            imports=("from torchao.quantization import Int4WeightOnlyConfig, quantize_",),
            model=tuple(CODE.splitlines()),
        )
