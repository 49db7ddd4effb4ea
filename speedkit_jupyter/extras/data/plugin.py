"""%speedkit loader, batch, free."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from argparse import Namespace
from functools import partial
from typing import Any

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.display import display
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.data import free as freed
from speedkit_jupyter.extras.data.batch_sizes import RANGE, BatchSweep
from speedkit_jupyter.extras.data.loader_tuner import LoaderTuner, step_over
from speedkit_jupyter.extras.kernels import attention
from speedkit_jupyter.notebook import namespace, options
from speedkit_jupyter.notebook.options import Names, Option, command, names_of
from speedkit_jupyter.notebook.plugins import Plugin
from speedkit_jupyter.notebook.progress import measured
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support.lookup import is_a, public, value_of
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue.samples import length_of

# Names that IPython binds by itself.
HIDDEN = re.compile(r"_+|_\d+|_i+|_i\d+|_[oid]h|In|Out|__.*|exit|quit|get_ipython|open")
LAST = ("_", "__", "___")
# Attributes of `sys` in which Python keeps the last error.
LAST_ERROR = ("last_traceback", "last_value", "last_exc", "last_type")


@command(
    "the fastest settings of a DataLoader, measured with your step",
    Option("loader", "LOADER", "without it the only one", namespace.loaders, nargs="?"),
    options.step("a function that takes a batch, or goes through the loader; or the last cell"),
    options.budget("for all of it (20)"),
    options.RESULT,
)
def loader(names: Names, session: Session, arguments: Namespace) -> None:
    known = [arguments.loader] if arguments.loader else list(namespace.loaders(names))
    if not known:
        raise UsageError("there is no DataLoader in this notebook yet: make one first")
    if len(known) > 1:
        raise UsageError(f"which one? {', '.join(known)}")
    found = namespace.find_loader(names, name := known[0])
    step, against = _step_with(names, session, arguments.step, found)
    text = f"%speedkit loader {name}" + f" --step {arguments.step}" * bool(arguments.step)
    tuner = LoaderTuner(step, found, arguments.budget, name, against, text)
    measured(tuner, "loading", names, arguments.v, lambda result: result.loader)


def _step_with(names: Names, session: Session, name: str | None, loader: Any) -> tuple[Step, str]:
    """Return the named function, or the last cell if it uses this loader, or loading alone."""
    if name is not None:
        return step_over(loader, namespace.find_function(names, name)), name
    if session.measured is not None:
        step = session.measured.step()
        if any(value is loader for value in step.walk().found.values()):
            return step, session.measured.title
    return step_over(loader), ""


def _sizes(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    if not (colon and least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise argparse.ArgumentTypeError(f"{text} is no range of sizes: give one as in 8:4096")
    return int(least), int(most)


@command(
    "samples a second and peak memory by batch size: knee, fastest, largest",
    options.step("a function that takes a batch, or goes through the loader; or the last cell"),
    Option("--data", "NAMES", "the batch that it takes: x,y", type=names_of),
    options.LOADER,
    Option("--range", "SIZES", "of sizes (8:4096)", type=_sizes, default=RANGE),
    options.budget("for all of it (20)"),
    options.RESULT,
)
def batch(names: Names, session: Session, arguments: Namespace) -> None:
    loader, data = namespace.find_loader(names, arguments.loader), None
    if arguments.data:
        known = [name for name, value in public(names) if length_of(value) is not None]
        data = tuple(value_of(names, word, known, "variable") for word in arguments.data)
    text, title = "%speedkit batch", ""
    if arguments.step is None:
        cell = session.last_cell()
        step, title = cell.step(), cell.title
        if loader is None:
            found = step.walk().found.values()
            loader = next((value for value in found if is_a(value, DataLoader)), None)
    else:
        step = namespace.find_function(names, arguments.step)
        text += f" --step {arguments.step}"
    sweep = BatchSweep(step, data, loader, arguments.range, arguments.budget, text, title)
    measured(sweep, "batches", names, arguments.v)


@command("release memory of errors and outputs, and list the memory of your variables")
def free(names: Names, session: Session, arguments: Namespace) -> None:
    shell: Any = get_ipython()
    users = {name: value for name, value in names.items() if not HIDDEN.fullmatch(name)}
    error, outputs = partial(forget_error, shell), partial(forget_outputs, names, shell)
    display(freed.free((error, outputs, attention.forget_masks), users))


def forget_error(shell: Any) -> str:
    """Remove the last error from Python and the shell; return a description of it."""
    tracebacks = [getattr(shell, name, None) for name in ("InteractiveTB", "SyntaxTB")]
    kept = [name for name in LAST_ERROR if hasattr(sys, name)]
    for name in kept:
        delattr(sys, name)
    kept_by_shell = [*itertools.product(tracebacks, ("etype", "evalue", "tb"))]
    for owner, name in (*kept_by_shell, (shell, "last_execution_result")):
        if hasattr(owner, name):
            setattr(owner, name, None)
    return "the last error (%debug has lost it)" if kept else ""


def forget_outputs(names: Names, shell: Any) -> str:
    """Clear `Out`, `_` and `_7`, unless the user has bound them; return a description."""
    outputs, hook = names.get("_oh", {}), vars(shell.displayhook)  # `Out` may be the user's
    known = {**outputs, **{name: hook[name] for name in LAST if name in hook}}
    ids = {id(value) for value in known.values()}
    for space in (names, shell.user_ns_hidden, hook):
        for name in (*LAST, *(f"_{number}" for number in outputs)):
            if id(space.get(name)) in ids:
                space[name] = ""
    number = len(outputs)
    outputs.clear()
    return f"{count(number, 'output')} (Out, _)" if number else ""


PLUGIN = Plugin([loader, batch, free])
