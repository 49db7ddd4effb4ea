"""Linear layers with 4-bit weights."""

from __future__ import annotations

from typing import Any

import torch

from speedkit_jupyter.catalog.base.decision import Switch
from speedkit_jupyter.extras.by_request.quantization import Quantization

# Weights per scale in int4; torchao requires rows of whole groups.
GROUP = 128


class Int4(Quantization):
    """Use 4-bit weights for inference: 16 levels within each group's range, with bf16 inputs."""

    name = "int4"
    summary = "linear layers with 4-bit weights, by torchao"
    helps = "memory-bound inference: language models that generate one token at a time"
    risk = "outputs change by several percent; slower for large batches"
    multiples, casts = (1, GROUP), True
    since, units = (8, 0), "torch's kernels for 4 bits"
    Options = Switch

    def config(self, value: Any, device: torch.device) -> tuple[str, dict[str, Any]]:
        arguments: dict[str, Any] = {"group_size": GROUP, "set_inductor_config": False}
        return "Int4WeightOnlyConfig", arguments | {"int4_packing_format": "tile_packed_to_4d"}
