"""The blocks that a model repeats: the layers of a transformer, the bottlenecks of a ResNet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# A list of blocks holds at least this share of the parameters of the largest such list: experts
# inside of each layer are many, and yet the layers are the blocks.
LEAST_SHARE = 0.25


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks in the model's order; none where nothing is repeated.

    Those of the longest `ModuleList` or `Sequential`, what other lists have of their class, and
    lists beside them: a decoder's, say. A block has parameters in two modules or more: one layer
    alone is none.
    """
    lists = _lists(model)
    largest = max((size for _, size in lists), default=0)
    chosen: list[list[torch.nn.Module]] = []
    kinds: set[type] = set()
    for alike, size in sorted(lists, key=lambda one: (len(one[0]), one[1]), reverse=True):
        known = type(alike[0]) in kinds
        if (known or size >= LEAST_SHARE * largest) and not _overlap(alike, chosen):
            chosen.append(alike)
            kinds.add(type(alike[0]))
    ids = {id(block) for alike in chosen for block in alike}
    return [module for module in model.modules() if id(module) in ids]


def _lists(model: torch.nn.Module) -> list[tuple[list[torch.nn.Module], int]]:
    """Every list of blocks that are alike, with the number of their parameters."""
    import torch

    return [
        (alike, _size(alike))
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
        for alike in _alike(module.children())
    ]


def _overlap(alike: list[torch.nn.Module], chosen: list[list[torch.nn.Module]]) -> bool:
    """Whether some of these lie inside of chosen blocks, or the other way round."""
    parts = {id(part) for block in alike for part in block.modules()}
    own = {id(block) for block in alike}
    return any(
        id(block) in parts or any(id(part) in own for part in block.modules())
        for blocks in chosen
        for block in blocks
    )


def _alike(children: Iterable[torch.nn.Module]) -> list[list[torch.nn.Module]]:
    """Two or more of one class."""
    kinds: dict[type, list[torch.nn.Module]] = {}
    for child in children:
        if _is_block(child):
            kinds.setdefault(type(child), []).append(child)
    return [alike for alike in kinds.values() if len(alike) > 1]


def _is_block(module: torch.nn.Module) -> bool:
    own = [
        part for part in module.modules() if any(p is not None for p in part._parameters.values())
    ]
    return len(own) > 1


def _size(modules: Iterable[torch.nn.Module]) -> int:
    from torch.nn.parameter import is_lazy

    parameters = {id(p): p for module in modules for p in module.parameters()}
    return sum(0 if is_lazy(p) else p.numel() for p in parameters.values())


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether something of the user's runs whenever a part of it runs."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
