"""The last layer of a model that chooses among many classes: a language model's words, say."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from speedkit_jupyter.optimizations.facts.blocks import repeated_blocks
from speedkit_jupyter.optimizations.facts.layers import is_linear

if TYPE_CHECKING:
    import torch

# With fewer classes, or hardly more than features, logits are not what takes memory.
LEAST_CLASSES, LEAST_RATIO = 1000, 2


class Head(NamedTuple):
    """A linear layer by its path, how many features it takes and how many classes it gives."""

    path: str
    features: int
    classes: int


def head(model: torch.nn.Module) -> Head | None:
    """The linear layer with most classes that is no part of a repeated block; the last of such."""
    import torch

    found: Head | None = None
    inside = {id(part) for block in repeated_blocks(model) for part in block.modules()}
    for path, module in model.named_modules():
        if type(module) is not torch.nn.Linear or not path or id(module) in inside:
            continue
        features, classes = module.in_features, module.out_features
        many = classes >= max(LEAST_CLASSES, LEAST_RATIO * features) and is_linear(module)
        if many and (found is None or classes >= found.classes):
            found = Head(path, features, classes)
    return found
