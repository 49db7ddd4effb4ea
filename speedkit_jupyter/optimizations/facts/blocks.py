"""The blocks that a model repeats: a transformer's layers, the units of a convolutional stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Group = list[torch.nn.Module]

# Blocks of a class that holds less than this of what those of the largest hold are of no account.
SMALL = 0.1


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Every block, in the model's order; none where nothing is repeated.

    Blocks are siblings of one class that are made of modules. Of some of them two are alike, with
    parameters of the same names and shapes; others may differ, as the first of a stage does. Lists
    and sequences of them count first, and only a model without any has them in its attributes.
    Blocks inside blocks are none.
    """
    kinds: set[Any] = set()
    for in_lists in (True, False):
        alike = [*_groups(model, in_lists, _has_twins)]
        sizes: Counter[Any] = Counter()
        for group in alike:
            sizes[_kind(group[0])] += sum(map(_size, group))
        least = SMALL * max(sizes.values(), default=0)
        kinds = {kind for kind, size in sizes.items() if size >= least}
        if kinds:
            break
    else:
        return []
    groups = _groups(model, in_lists, lambda group: _kind(group[0]) in kinds)
    blocks = {id(block) for group in groups for block in group}
    return [module for module in model.modules() if id(module) in blocks]


def _groups(
    module: torch.nn.Module,
    in_lists: bool,
    suits: Callable[[Group], bool],
    above: tuple[torch.nn.Module, ...] = (),
) -> Iterator[Group]:
    """The outermost groups of siblings of one kind that suit; `above` are what holds the module,
    which may hold one of those too.
    """
    if not module._modules:
        return
    siblings: dict[Any, Group] = {}
    above = (*above, module)
    for child in module.children():
        if not any(child is outer for outer in above):
            siblings.setdefault(_kind(child), []).append(child)
    for group in siblings.values():
        if (_is_list(module) or not in_lists) and len(group) > 1 and suits(group):
            yield group
        else:
            for child in group:
                yield from _groups(child, in_lists, suits, above)


def _has_twins(group: Group) -> bool:
    """Whether two of these are alike; lists of modules are not called, and a layer has no parts."""
    import torch

    first = group[0]
    if isinstance(first, torch.nn.ModuleList | torch.nn.ModuleDict):
        return False
    if not any(True for _ in first.children()):
        return False
    shapes = Counter(map(_shapes, group))
    return any(count > 1 and shape for shape, count in shapes.items())


def _is_list(module: torch.nn.Module) -> bool:
    import torch

    return isinstance(module, torch.nn.ModuleList | torch.nn.Sequential | torch.nn.ModuleDict)


def _kind(module: torch.nn.Module) -> Any:
    """Its class; for a plain sequence, which says nothing by itself, those of its parts too."""
    import torch

    if type(module) is not torch.nn.Sequential:
        return type(module)
    return (type(module), *map(_kind, module.children()))


def _shapes(module: torch.nn.Module) -> tuple[Any, ...]:
    from torch.nn.parameter import is_lazy

    tensors = (*module.named_parameters(), *module.named_buffers())
    return tuple((name, None if is_lazy(t) else tuple(t.shape)) for name, t in tensors)


def _size(module: torch.nn.Module) -> int:
    from torch.nn.parameter import is_lazy

    return sum(0 if is_lazy(p) else p.numel() for p in module.parameters()) or 1
