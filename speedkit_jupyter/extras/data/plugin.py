"""%speedkit loader, batch, free."""

from __future__ import annotations

import argparse
import itertools
import re
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.extras.data import free as freed
from speedkit_jupyter.extras.data.batch_sweep import sweep_of
from speedkit_jupyter.extras.data.free import MemoryHolder
from speedkit_jupyter.extras.data.loader_tuner import LoaderTuner, step_over
from speedkit_jupyter.extras.kernels import attention
from speedkit_jupyter.notebook import namespace, options
from speedkit_jupyter.notebook.commands.steps import last_cell
from speedkit_jupyter.notebook.options import Names, Option, command, names_of
from speedkit_jupyter.notebook.plugins import Plugin
from speedkit_jupyter.notebook.progress import measured
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support.lookup import public, value_of
from speedkit_jupyter.torchglue.samples import length_of

# Names that IPython binds by itself.
HIDDEN = re.compile(r"_+|_\d+|_i+|_i\d+|_[oid]h|In|Out|__.*|exit|quit|get_ipython|open")
LAST = ("_", "__", "___")
OF_AN_ERROR = ("etype", "evalue", "tb")


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
    asked = f" --step {arguments.step}" if arguments.step else ""
    text = f"%speedkit loader {name}{asked}"
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
    options.step("a function that takes a batch, or reads its tensors; without it the last cell"),
    Option("--data", "NAMES", "the batch that it takes, or reads by name: x,y", type=names_of),
    options.LOADER,
    Option("--range", "SIZES", "of sizes (8:4096)", type=_sizes, default=(8, 4096)),
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
        cell = last_cell(session)
        step, title = cell.step(), cell.title
    else:
        step = namespace.find_function(names, arguments.step)
        text += f" --step {arguments.step}"
    sweep = sweep_of(step, data, loader, arguments.range, arguments.budget, text, title)
    measured(sweep, "batches", names, arguments.v)


@command("release memory that an error or an output holds, and list it")
def free(names: Names, session: Session, arguments: Namespace) -> None:
    shell: Any = get_ipython()
    apart = [names, shell, getattr(shell, "user_ns_hidden", None)]
    users = {name: value for name, value in names.items() if not HIDDEN.fullmatch(name)}
    display(freed.free(_holders(names, shell), users, apart))


def _holders(names: Names, shell: Any) -> Iterator[MemoryHolder]:
    owners = [getattr(shell, name, None) for name in ("InteractiveTB", "SyntaxTB")]
    kept = [*itertools.product(owners, OF_AN_ERROR), (shell, "last_execution_result")]
    yield freed.last_error(kept)
    yield attention.kept_masks()
    outputs = names.get("_oh", {})  # `Out` may be a name of the user's
    for number in list(outputs):
        yield _output(names, shell, f"Out[{number}], _{number}", outputs, number)
    yield from (_output(names, shell, name, names, name) for name in LAST)


def _output(names: Names, shell: Any, word: str, owner: Any, key: Any) -> MemoryHolder:
    def roots() -> list[Any]:
        return [value for value in [owner.get(key)] if value is not None]

    def forget() -> None:
        """Unbind the value under all of IPython's names, unless the user bound another value."""
        hook = getattr(shell, "displayhook", None)
        spaces = (names, getattr(shell, "user_ns_hidden", {}), getattr(hook, "__dict__", {}))
        for value in roots():
            names.get("_oh", {}).pop(key, None)
            for space, name in itertools.product(spaces, (*LAST, f"_{key}")):
                if space.get(name) is value:
                    space[name] = ""

    return MemoryHolder(word, roots, forget, "the output's value")


PLUGIN = Plugin([loader, batch, free])
