"""What a call returns, and autograd's graph behind it: whether a replay can give the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PYTHON_BACKWARD = "its backward pass runs Python code ({})"
OTHER_LEAF = "gradients go to tensors that are neither weights of it, nor passed to it"
SHARED = "what it returns shares memory with its weights, its inputs or another result"
RETURNS = "a {} is among its results"


def memory(tensor: torch.Tensor) -> int:
    """Where its storage begins; 0 for one that has none, -1 for one that can't be asked."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse ones, and such as only pass as tensors
        return -1


def results(value: Any) -> tuple[list[Any], Any]:
    """The leaves of what a call returns, and what torch puts them together by."""
    import torch

    leaves, spec = torch.utils._pytree.tree_flatten(value)
    return leaves, spec


def hindrance_in(value: Any, known: Iterable[int]) -> str:
    """Whether there is anything but tensors with memory of their own, and plain values; `known` is
    the memory of weights and inputs.
    """
    import torch

    taken = {*known} - {0}
    unique = {id(leaf): leaf for leaf in results(value)[0]}
    for leaf in unique.values():
        if type(leaf) in (torch.Tensor, torch.nn.Parameter):
            if leaf.layout is not torch.strided or leaf.is_conj() or leaf.is_neg():
                return RETURNS.format("sparse or conjugated tensor")
            if memory(leaf) in taken:
                return SHARED
            taken |= {memory(leaf)} - {0}
        elif not isinstance(leaf, int | float | str | None):
            return RETURNS.format(type(leaf).__name__)
    return ""


def hindrance_behind(value: Any, model: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> str:
    """Of the backward pass, which has not run yet."""
    from torch.autograd.function import BackwardCFunction

    ours = {id(tensor) for tensor in (*model.parameters(), *tensors)}
    for node in nodes(value, tensors):
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in ours:
            return OTHER_LEAF
        if isinstance(node, BackwardCFunction):
            return PYTHON_BACKWARD.format(type(node).__name__)
    return ""


def nodes(value: Any, tensors: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Those of autograd's graph behind the results, down to what was passed to the call."""
    import torch

    leaves = [leaf for leaf in results(value)[0] if isinstance(leaf, torch.Tensor)]
    ends = {tensor.grad_fn for tensor in tensors}
    waiting, seen = [leaf.grad_fn for leaf in leaves], {*ends}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [function for function, _ in node.next_functions]
