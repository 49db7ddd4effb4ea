"""What a layer is, how its weight lies, and which blocks repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear as Lending
from torch.nn.parameter import is_lazy

from speedkit_jupyter.catalog.properties.tensors import weight_of
from speedkit_jupyter.torchglue.modules import parameter_table

if TYPE_CHECKING:
    Group = list[torch.nn.Module]


def is_convolution(module: torch.nn.Module) -> bool:
    """Return whether this is a 2-D or 3-D convolution whose weight can be laid out anew."""
    convolution: Any = torch.nn.Conv2d.__base__
    weight = parameter_table(module).get("weight") if isinstance(module, convolution) else None
    return weight is not None and not is_lazy(weight) and weight.dim() in (4, 5)


def is_linear(module: torch.nn.Module) -> bool:
    """Return whether this is a linear layer that multiplies by itself: the last one of torch's
    attention only lends its weight.
    """
    return isinstance(module, torch.nn.Linear) and not isinstance(module, Lending)


def has_lazy_parameters(holder: torch.nn.Module | torch.optim.Optimizer) -> bool:
    """Return whether some parameter gets its shape at the first forward pass only."""
    if isinstance(holder, torch.optim.Optimizer):
        return False
    return any(map(is_lazy, (*holder.parameters(), *holder.buffers())))


def channels_last_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a 4-D or 5-D tensor with its channels last, in elements."""
    layout = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return torch.empty(tensor.shape, memory_format=layout, device="meta").stride()


def is_channels_last(convolution: torch.nn.Module) -> bool:
    """Return whether the weight's strides are channels-last: torch's kernels choose by them, also
    where both layouts hold the same bytes in the same order (one channel, a 1x1 kernel).
    """
    weight = weight_of(convolution)
    return weight.stride() == channels_last_stride(weight)


def attribute(module: torch.nn.Module, name: str) -> Any:
    """Return a module's attribute; `getattr` looks long for what there is not."""
    return vars(module).get(name, getattr(type(module), name, None))


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return every block, in the model's order: modules of modules, in one list or sequence with
    others of their class, some of them alike in the names and shapes of their parameters. Modules
    of such a class in other lists are blocks too; blocks inside blocks are none.
    """
    kinds = {_kind(group[0]) for group in _groups(model) if _has_twins(group)}
    blocks = {id(one) for group in _groups(model, kinds) for one in group}
    return [module for module in model.modules() if id(module) in blocks]


def _groups(
    module: torch.nn.Module,
    kinds: set[Any] | None = None,
    above: tuple[torch.nn.Module, ...] = (),
) -> Iterator[Group]:
    """Yield the outermost groups of siblings of one kind, of these kinds or that have twins;
    `above` holds the module, and may be held by it.
    """
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
    is_list = isinstance(group[0], torch.nn.ModuleList | torch.nn.ModuleDict)
    if is_list or not any(True for _ in group[0].children()):
        return False
    found = Counter(map(shapes, group))
    return any(count > 1 and shape for shape, count in found.items())


def _kind(module: torch.nn.Module) -> Any:
    """Return its class; for a plain sequence, which says nothing, those of its parts too."""
    if type(module) is not torch.nn.Sequential:
        return type(module)
    return (type(module), *map(_kind, module.children()))


def shapes(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return the names and shapes of its parameters and buffers; None while they have no shape."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return tuple((name, None if is_lazy(t) else tuple(t.shape)) for name, t in tensors)
