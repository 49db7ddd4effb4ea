"""Graphs of before that `torch.autograd.grad` can't be asked about after a check in float64.

A tensor that is given another dtype, as by `model.double()`, forgets where graphs of before end at
it: `backward()` still finds it from there, `torch.autograd.grad(loss, parameters)` does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.undo.graphs import still_saved
from speedkit_jupyter.measure.undo.kinds.code.names import namespaces
from speedkit_jupyter.measure.undo.kinds.tensors.histories import Leaves, has_graph
from speedkit_jupyter.measure.undo.walk import Walk

if TYPE_CHECKING:
    import torch

# Of a longer container the first ones tell.
MOST = 64


def names(walk: Walk, models: Sequence[torch.nn.Module]) -> list[str]:
    """What the notebook calls those that lead to a parameter of the models, and can be gone back
    through: no backward pass has freed what they saved.
    """
    import torch

    ends = {
        id(parameter)
        for model in models
        for parameter in model.parameters()
        if parameter.dtype not in (torch.float64, torch.complex128)
    }
    found = {id(tensor): walk.name(tensor) for tensor in walk.graphs if _leads_to(tensor, ends)}
    for space in namespaces(walk.found.values()):
        for name, value in list(space.items()):
            for word, part in _parts(name, value):
                if id(part) not in found and _leads_to(part, ends):
                    found[id(part)] = word
    return list(found.values())


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    cls = type(value)
    if cls is list or cls is tuple:
        yield from ((f"{name}[{number}]", part) for number, part in enumerate(value[:MOST]))
    elif cls is dict:
        yield from ((f"{name}[{key!r:.40}]", part) for key, part in islice(value.items(), MOST))
    else:
        yield name, value


def _leads_to(value: Any, ends: set[int]) -> bool:
    import torch

    if not issubclass(type(value), torch.Tensor) or not has_graph(value):
        return False
    leaves = any(id(leaf) in ends for leaf in Leaves().of(value))
    return leaves and still_saved(value.grad_fn) is not None
