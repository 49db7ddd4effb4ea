"""Linear layers whose weights have 4 bits."""

from __future__ import annotations

from typing import Any

import torch

from speedkit_jupyter.catalog.base.decision import Switch
from speedkit_jupyter.extras.by_request.quantization import Quantization

# Weights per scale in int4; torchao takes only rows of whole groups.
GROUP = 128


class Int4(Quantization):
    """For inference: weights have 16 levels within their group's range, inputs are bf16."""

    name = "int4"
    summary = "linear layers with weights of 4 bits, by torchao"
    helps = "inference that waits for memory: language models that write one token after another"
    risk = "another model, by several percent of its outputs; slower for large batches"
    multiples, casts = (1, GROUP), True
    since, units = (8, 0), "torch's kernels for 4 bits"
    Options = Switch

    def config(self, value: Any, device: torch.device) -> tuple[str, dict[str, Any]]:
        arguments: dict[str, Any] = {"group_size": GROUP, "set_inductor_config": False}
        return "Int4WeightOnlyConfig", arguments | {"int4_packing_format": "tile_packed_to_4d"}
