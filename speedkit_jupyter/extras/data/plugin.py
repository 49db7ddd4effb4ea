"""The magics `%speedkit loader` and `%speedkit batch`; the plug-in also has `%speedkit free`."""

from __future__ import annotations

import argparse
from argparse import Namespace
from typing import Any

from IPython.core.error import UsageError
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.data.batch_sizes import RANGE, BatchSweep
from speedkit_jupyter.extras.data.free import free
from speedkit_jupyter.extras.data.loader_tuner import LOADING_BUDGET_S, LoaderTuner, step_over
from speedkit_jupyter.extras.data.micro_batch import length_of
from speedkit_jupyter.notebook import namespace, options
from speedkit_jupyter.notebook.options import Names, Option, comma_list, command
from speedkit_jupyter.notebook.plugins import Plugin
from speedkit_jupyter.notebook.progress import run_and_show
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support.lookup import is_a, public, value_of


@command(
    "the fastest settings of a DataLoader, measured with your step",
    Option("loader", "LOADER", "default: the only DataLoader", namespace.loaders, nargs="?"),
    options.step("a function that takes a batch, or goes through the loader; or the last cell"),
    options.budget(f"in total ({LOADING_BUDGET_S:g})"),
    options.RESULT,
)
def loader(names: Names, session: Session, arguments: Namespace) -> None:
    known = [arguments.loader] if arguments.loader else list(namespace.loaders(names))
    if not known:
        raise UsageError("this notebook has no DataLoader yet: create one first")
    if len(known) > 1:
        raise UsageError(f"give the loader's name: {', '.join(known)}")
    found = namespace.find_loader(names, name := known[0])
    step, against = _step_with(names, session, arguments.step, found)
    text = f"%speedkit loader {name}" + f" --step {arguments.step}" * bool(arguments.step)
    tuner = LoaderTuner(step, found, arguments.budget, name, against, text)
    run_and_show(tuner, "loading", names, arguments.v, lambda result: result.loader)


def _step_with(names: Names, session: Session, name: str | None, loader: Any) -> tuple[Step, str]:
    """Return a step and its name. Without `name`, take the last cell if it uses the loader."""
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
        raise argparse.ArgumentTypeError(f"{text} is not a range of sizes, such as 8:4096")
    return int(least), int(most)


@command(
    "samples a second and peak memory by batch size: knee, fastest, largest",
    options.step("a function that takes a batch, or goes through the loader; or the last cell"),
    Option("--data", "NAMES", "the batch that it takes: x,y", type=comma_list),
    options.LOADER,
    Option("--range", "SIZES", "smallest and largest size (8:4096)", type=_sizes, default=RANGE),
    options.budget(f"in total ({LOADING_BUDGET_S:g})"),
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
    run_and_show(sweep, "batches", names, arguments.v)


PLUGIN = Plugin([loader, batch, free])
