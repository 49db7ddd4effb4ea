"""Linear layers that train in 8-bit floating point, by torchao."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Switch
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.twins import quantizing
from speedkit_jupyter.optimizations.twins.compression import older_than
from speedkit_jupyter.optimizations.twins.quantization import FUSED, Quantization

if TYPE_CHECKING:
    import torch

# The first compute capability whose Tensor Cores multiply float8.
SINCE = (8, 9)
CODE = """\
convert_to_float8_training(
    model,
    config=Float8LinearConfig(pad_inner_dim=True),
    module_filter_fn=lambda layer, name: type(layer) is torch.nn.Linear
    and layer.in_features % 16 == layer.out_features % 16 == 0,
)"""


class Float8(Quantization):
    """Weights, inputs and gradients are scaled and rounded to float8 before each product.

    The weights stay what they are, and what steps them steps them.
    """

    name = "float8"
    summary = "linear layers in 8-bit floating point, by torchao"
    helps = "training and inference with large linear layers on Ada, Hopper and later, compiled"
    risk = (
        "products of 3 to 4 bits: the loss has to be watched; slower where nothing fuses the "
        "casts, which `compile` does"
    )
    undone = "the weights never left their places: they multiply as before"
    page = (
        "https://docs.pytorch.org/ao/stable/api_reference/generated/torchao.float8."
        "convert_to_float8_training.html"
    )
    for_training = True
    multiples = (16, 16)  # rows of the input are filled up
    hint = FUSED
    Options = Annotated[Switch, Field(description="auto, true, false")]

    def missing_units(self, value: Any, hardware: Hardware, facts: Facts) -> str:
        """Ada's and Hopper's Tensor Cores multiply it, and later ones."""
        has = older_than(SINCE, hardware, facts)
        return has and f"float8 Tensor Cores come with compute capability 8.9 (Ada, Hopper); {has}"

    def maker(self, decision: Decision, target: Target) -> Callable[[Any], Any]:
        """Layers of torchao's."""
        return partial(_layer, _config())

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """torchao's own call, which replaces the layers."""
        return Snippet(
            imports=("from torchao.float8 import Float8LinearConfig, convert_to_float8_training",),
            model=tuple(CODE.splitlines()),
        )


def _config(**more: Any) -> Any:
    """As torchao's default (a scale for each tensor), for any number of rows."""
    return quantizing.imported("float8").Float8LinearConfig(pad_inner_dim=True, **more)


def _layer(config: Any, weight: Any) -> torch.nn.Module:
    """torchao's layer over the user's own parameter."""
    kind = quantizing.imported("float8.float8_linear").Float8Linear
    rows, columns = weight.shape
    layer: torch.nn.Module = kind(columns, rows, bias=False, config=config, device="meta")
    layer.weight = weight
    return layer
