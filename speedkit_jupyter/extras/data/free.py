"""The magic `%speedkit free`: release errors, outputs and caches; list variables' memory."""

from __future__ import annotations

import gc
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from operator import itemgetter
from typing import Any

import numpy as np
import psutil
import torch
from IPython import get_ipython
from IPython.display import display

from speedkit_jupyter.extras.kernels.attention import forget_masks
from speedkit_jupyter.machines import devices
from speedkit_jupyter.notebook.options import Names, command
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.report.elements import BLANK, Section, Table
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.step import memory
from speedkit_jupyter.support import units
from speedkit_jupyter.support.lookup import public
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue import heap
from speedkit_jupyter.torchglue.storage import tensors_in

# Names that IPython binds to the last outputs.
LAST = ("_", "__", "___")
# Attributes of `sys`, and of the shell's traceback formatter, that keep the last error.
IN_SYS = ("last_traceback", "last_value", "last_exc", "last_type")
IN_TRACEBACK = ("etype", "evalue", "tb")


@command("release memory of errors and outputs, and list the memory of your variables")
def free(names: Names, session: Session, arguments: Namespace) -> None:
    shell, before = get_ipython(), dict(_used_bytes())
    found = (forget_error(shell), forget_outputs(names, shell), forget_masks())
    gc.collect()
    devices.release_cached()
    if (glibc := heap.library()) is not None:
        glibc.malloc_trim(0)  # returns free memory to the system
    lines = [
        f"{place}: {units.size(before.get(place, 0))} before, {units.size(now)} now"
        for place, now in _used_bytes()
    ]
    released = ", ".join(filter(None, found)) or "nothing was held but by your variables"
    own = Section(variables_table(names), "Your own tensors and arrays by variable, not touched")
    display(Document(f"Released: {released}", ["\n".join(lines), own]))


def _used_bytes() -> Iterator[tuple[str, int]]:
    """Yield the bytes in use by the process, and by tensors on each kind of accelerator."""
    yield "this process", psutil.Process().memory_info().rss
    for kind in devices.in_use():
        yield kind.name, kind.allocated_bytes()


def variables_table(names: Mapping[str, Any]) -> Table:
    """Return a table of the 8 largest variables with 1 MiB or more, or with graphs."""
    held = [(name, *_held_by(value)) for name, value in public(names)]
    held = [row for row in held if row[1] >= 2**20 or row[2]]  # at least 1 MiB, or a graph
    rows = []
    for name, number, graphs in sorted(held, key=itemgetter(1), reverse=True)[:8]:
        remark = f"{count(graphs, 'tensor')} with a graph: .detach() releases its tensors"
        rows.append((name, units.size(number), remark if graphs else BLANK))
    return Table(("name", "holds", "remark"), rows, ("holds",))


def _held_by(value: Any) -> tuple[int, int]:
    """Return the bytes of a variable's tensors or array, and its number of tensors with a graph."""
    tensors = list[torch.Tensor]()
    with suppress(ReferenceError):  # a weak proxy of a deleted object
        tensors += tensors_in(value)
        models = [value] if isinstance(value, torch.nn.Module) else []
        optimizers = [value] if isinstance(value, torch.optim.Optimizer) else []
        tensors += memory.state_tensors(models, optimizers)
    array = value.nbytes if issubclass(type(value), np.ndarray) else 0
    return memory.size(tensors) + array, sum(one.grad_fn is not None for one in tensors)


def forget_error(shell: Any) -> str:
    """Remove the last error from Python and the shell; return a description, empty if none."""
    kept = [name for name in IN_SYS if hasattr(sys, name)]
    for name in kept:
        delattr(sys, name)
    vars(shell.InteractiveTB).update(dict.fromkeys(IN_TRACEBACK))
    shell.last_execution_result = None
    return "the last error (%debug has lost it)" if kept else ""


def forget_outputs(names: Names, shell: Any) -> str:
    """Clear IPython's `Out`, `_`, `_1` and so on, not user variables; return a summary or ""."""
    outputs, hook = names.get("_oh", {}), vars(shell.displayhook)  # `Out` may be the user's
    ids = {id(value) for value in (*outputs.values(), *(hook.get(name) for name in LAST))}
    for space in (names, shell.user_ns_hidden, hook):
        for name in (*LAST, *(f"_{number}" for number in outputs)):
            if name in space and id(space[name]) in ids:
                space[name] = ""
    number = len(outputs)
    outputs.clear()
    return f"{count(number, 'output')} (Out, _)" if number else ""
