"""What autograd knows of tensors: the leaves behind their graphs, how often each was written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.undo.kinds.base import attribute_dict

if TYPE_CHECKING:
    import torch

# Of all graphs together so many nodes are looked at.
MOST_NODES = 50_000


def has_graph(tensor: torch.Tensor) -> bool:
    """Whether a gradient would go on from it."""
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # a view of what was written to in a way that autograd does not allow
        return False


class Leaves:
    """What lies behind graphs: tensors that get gradients, and objects of the user's Functions.

    `beyond` are tensors whose graphs were too large to be looked through.
    """

    def __init__(self) -> None:
        self.beyond: list[torch.Tensor] = []
        self._nodes: dict[int, Any] = {}

    def of(self, tensor: torch.Tensor) -> Iterator[Any]:
        """Those that no other graph has led to yet."""
        waiting = [tensor.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or id(node) in self._nodes:
                continue
            if len(self._nodes) >= MOST_NODES:
                self.beyond.append(tensor)
                return
            self._nodes[id(node)] = node
            if hasattr(node, "variable"):
                yield node.variable
            if attribute_dict(node):  # one that the user wrote keeps what it likes
                yield node
            waiting += [parent for parent, _ in node.next_functions]

    def forget(self) -> None:
        """All has been looked through; a node would keep its leaf alive."""
        self._nodes.clear()


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """How often each counts as written: a graph that saved one compares it with then.

    Only for tensors that hold the values of then again.
    """
    import torch

    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))
