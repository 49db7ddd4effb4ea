"""The blocks that a model repeats: a transformer's layers, the units of a convolutional stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Group = list[torch.nn.Module]


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return every block, in the model's order; none where nothing is repeated.

    Blocks are made of modules, and lie in one list or sequence with others of their class, some of
    them alike in the names and shapes of their parameters; the first of a stage may differ. Once a
    class is known as one of blocks, its modules in other lists are blocks too. Blocks inside blocks
    are none.
    """
    kinds = {_kind(group[0]) for group in _groups(model) if _has_twins(group)}
    blocks = {id(one) for group in _groups(model, kinds) for one in group}
    return [module for module in model.modules() if id(module) in blocks]


def _groups(
    module: torch.nn.Module,
    kinds: set[Any] | None = None,
    above: tuple[torch.nn.Module, ...] = (),
) -> Iterator[Group]:
    """Yield the outermost groups of siblings of one kind, of these kinds or that have twins.

    `above` are what holds the module, which may hold one of those too.
    """
    import torch

    lists = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
    siblings: dict[Any, Group] = {}
    above = (*above, module)
    for child in module.children():
        if not any(child is outer for outer in above):
            siblings.setdefault(_kind(child), []).append(child)
    for kind, group in siblings.items():
        suits = _has_twins(group) if kinds is None else kind in kinds
        if isinstance(module, lists) and len(group) > 1 and suits:
            yield group
        else:
            for child in group:
                yield from _groups(child, kinds, above)


def _has_twins(group: Group) -> bool:
    """Return whether two are alike; lists of modules are not called, and a layer has no parts."""
    import torch

    is_list = isinstance(group[0], torch.nn.ModuleList | torch.nn.ModuleDict)
    if is_list or not any(True for _ in group[0].children()):
        return False
    shapes = Counter(map(_shapes, group))
    return any(count > 1 and shape for shape, count in shapes.items())


def _kind(module: torch.nn.Module) -> Any:
    """Return its class; for a plain sequence, which says nothing, those of its parts too."""
    import torch

    if type(module) is not torch.nn.Sequential:
        return type(module)
    return (type(module), *map(_kind, module.children()))


def _shapes(module: torch.nn.Module) -> tuple[Any, ...]:
    from torch.nn.parameter import is_lazy

    tensors = (*module.named_parameters(), *module.named_buffers())
    return tuple((name, None if is_lazy(t) else tuple(t.shape)) for name, t in tensors)
