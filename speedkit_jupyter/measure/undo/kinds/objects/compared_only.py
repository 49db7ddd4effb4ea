"""What can be compared, and not be put back: named where it shows that it was changed."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import Copies, Kind


class Watched(Kind):
    """A memory to compare with; `put_back` raises what is said then."""

    why = ""

    def same(self, instance: Any, memory: Any) -> bool:
        """By value."""
        return bool(self.copy(instance, Copies()) == memory)

    def put_back(self, instance: Any, memory: Any) -> None:
        """Raises RuntimeError."""
        raise RuntimeError(self.why)


class Graphs(Watched):
    """Programs of `torch.fx`, which a step may edit: their nodes, by identity."""

    why = "its nodes were edited"
    anywhere = True

    def recognizes(self, cls: type) -> bool:
        """Where it is loaded."""
        graph = getattr(sys.modules.get("torch.fx"), "Graph", None)
        return graph is not None and issubclass(cls, graph)

    def copy(self, instance: Any, copies: Copies) -> list[Any]:
        """What each node does, and with what."""
        return [(id(n), n.op, id(n.target), str(n.args), str(n.kwargs)) for n in instance.nodes]


class Seeds(Watched):
    """numpy's seed sequences: each child that is spawned is another. They are loaded as pickled."""

    why = "it has spawned children"

    def recognizes(self, cls: type) -> bool:
        """Where numpy is loaded."""
        random: Any = getattr(sys.modules.get("numpy"), "random", None)
        return random is not None and issubclass(cls, random.SeedSequence)

    def copy(self, instance: Any, copies: Copies) -> tuple[int, Any]:
        """How many children it has had, and all else."""
        reduced = instance.__reduce__()
        state = reduced[2] if len(reduced) > 2 else reduced[1][-1]
        return int(instance.n_children_spawned), state

    def same(self, instance: Any, memory: tuple[int, Any]) -> bool:
        """By the number of its children."""
        return bool(instance.n_children_spawned == memory[0])

    def put_back(self, instance: Any, memory: tuple[int, Any]) -> None:
        """Raises RuntimeError where this numpy can't."""
        load = getattr(instance, "__setstate_cython__", None)
        if load is not None:
            load(memory[1])
        if not self.same(instance, memory):
            super().put_back(instance, memory)


class Folders(Watched):
    """Temporary folders, which go at once when they are told to."""

    why = "it was removed"

    def recognizes(self, cls: type) -> bool:
        """Those of `tempfile`."""
        return issubclass(cls, tempfile.TemporaryDirectory)

    def copy(self, instance: Any, copies: Copies) -> bool:
        """Whether it is there."""
        return os.path.isdir(instance.name)
