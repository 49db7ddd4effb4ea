"""Linear layers in 8-bit floating point."""

from __future__ import annotations

from typing import Any

import torch

from speedkit_jupyter.catalog.base.decision import Decision, Form, Snippet, Switch
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.extras.by_request.quantization import Quantization, torchao

FLOAT8 = """\
convert_to_float8_training(
    model,
    config=Float8LinearConfig(pad_inner_dim=True),
    module_filter_fn=lambda layer, name: type(layer) is torch.nn.Linear
    and layer.in_features % 16 == layer.out_features % 16 == 0,
)"""


class Float8(Quantization):
    """Use torchao's layers, which round weights, inputs and gradients before each product."""

    name = "float8"
    summary = "linear layers in 8-bit floating point, by torchao"
    helps = "training and inference with large linear layers on Ada, Hopper and later, compiled"
    risk = "products of 3 to 4 significant bits: watch the loss; slower unless the casts are fused"
    for_training = True
    multiples = (16, 16)
    hint = "`compile` fuses the casts, without which it may be slower"
    since, units, early = (8, 9), "float8 Tensor Cores", (True,)
    Options = Switch

    def made(self, value: Any, layer: torch.nn.Linear) -> Any:
        config = torchao("float8").Float8LinearConfig(pad_inner_dim=True)
        new = torchao("float8.float8_linear").Float8Linear.from_float(layer, config=config)
        return new.train(layer.training)

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        imports = ("from torchao.float8 import Float8LinearConfig, convert_to_float8_training",)
        return Snippet(imports=imports, model=tuple(FLOAT8.splitlines()))
