"""Release memory that holders other than the user's variables keep, and list these variables."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch

from speedkit_jupyter.machines import devices
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import BLANK, Section, Table
from speedkit_jupyter.rounds.presentable import Shown, report_of
from speedkit_jupyter.step import memory
from speedkit_jupyter.support import units
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue.samples import tensors_in


@dataclass(repr=False)
class Freed(Shown):
    """The `released` holders, and rows of the variables that hold memory, `kept`: name, bytes of
    tensors, and the number of tensors with a graph, which keeps tensors that are not counted.

    `used_bytes` are the bytes before and after, of the process and of tensors on each accelerator.
    """

    REPORTS = __name__

    released: Sequence[str] = ()
    kept: Sequence[dict[str, Any]] = ()
    used_bytes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        return list(self.kept)

    def to_dict(self) -> dict[str, Any]:
        used = {name: list(pair) for name, pair in self.used_bytes.items()}
        return {"released": list(self.released), "rows": self.rows(), "used_bytes": used}


def free(holders: Iterable[Callable[[], str]], names: Mapping[str, Any]) -> Freed:
    """Call the holders, which release memory and return its description, or nothing.

    The variables `names` are kept.
    """
    before = _used_bytes()
    released = [word for release in holders if (word := release())]
    gc.collect()
    devices.release_cached()
    if sys.platform == "linux":  # gives free pages to the system, where its C library can
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    kept = [held_by(name, value) for name, value in names.items()]
    kept = [one for one in kept if one["bytes"] >= 1 << 20 or one["graphs"]]  # 1 MiB or more
    kept.sort(key=itemgetter("bytes"), reverse=True)
    used = {name: (before.get(name, 0), now) for name, now in _used_bytes().items()}
    return Freed(released, kept[:8], used)


def _used_bytes() -> dict[str, int]:
    import psutil

    used = {"this process": int(psutil.Process().memory_info().rss)}
    for kind in devices.in_use():
        if hasattr(kind.module, "memory_allocated"):
            used[kind.name] = int(kind.module.memory_allocated())
    return used


def held_by(name: str, value: Any) -> dict[str, Any]:
    """Return the row of a variable: a model, an optimizer, or tensors, also in containers."""
    tensors = list[torch.Tensor]()
    with suppress(ReferenceError):  # a dead proxy
        tensors += tensors_in(value)
        models = [value] if isinstance(value, torch.nn.Module) else []
        optimizers = [value] if isinstance(value, torch.optim.Optimizer) else []
        tensors += memory.state_tensors(models, optimizers)
    graphs = sum(one.grad_fn is not None for one in tensors)
    return {"name": name, "bytes": memory.size(tensors), "graphs": graphs}


@report_of.register
def free_report(freed: Freed) -> Document:
    """Return the released holders, and the variables that hold the rest."""
    columns = ("name", "holds", "remark")
    rows = []
    for row in freed.kept:
        remark = f"{count(row['graphs'], 'tensor')} with a graph: .detach() releases its tensors"
        rows.append((row["name"], units.size(row["bytes"]), remark if row["graphs"] else BLANK))
    headline = f"Released: {', '.join(freed.released) or 'nothing was held but by your variables'}"
    lines = [
        f"{name}: {units.size(before)} before, {units.size(after)} now"
        for name, (before, after) in freed.used_bytes.items()
    ]
    own = Section(Table(columns, rows, columns[1:2]), "Your own variables, which were not touched")
    return Document(headline, ["\n".join(lines), own], freed.to_dict())
