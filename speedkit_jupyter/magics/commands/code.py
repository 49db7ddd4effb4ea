"""%speedkit code: the plan as code without SpeedKit."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.codegen.forms import FORMS, as_of_now, code_report
from speedkit_jupyter.magics.line import Command, Names, Parser
from speedkit_jupyter.magics.namespace import (
    find_model,
    find_optimizers,
    named,
    planned,
    words_for,
)
from speedkit_jupyter.magics.options import add_model, add_optimizer
from speedkit_jupyter.plans.preview import preview
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.session import Session
from speedkit_jupyter.support import lookup
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.wrappers import unwrapped

# What the session says behind the name of a model that has no name any more.
EARLIER = re.compile(r" \((an )?earlier model.*\)$")


def run(names: Names, session: Session, arguments: Namespace) -> None:
    """Show the plan in force, or what apply would do; one that was tuned since comes first."""
    applied = dict(session.applied(names))
    name = named(names, applied, arguments.model)
    context, note = applied.get(name), ""
    if context is None:
        model = find_model(names, name)[1]
        optimizers = find_optimizers(names, arguments.optimizer, model)
        plan = planned(names, session.config, name, optimizers)
    else:
        model = context.model
        asked = arguments.optimizer and find_optimizers(names, arguments.optimizer, model)
        plan, listed = as_of_now(context, asked or {})
        optimizers = words_for(names, listed)
        found = session.found_for(model)
        if found and found.proof and found.is_newer and not found.is_in_force(model):
            plan = preview(model, found.config, listed).plan
            note = f"Tuned, and not in force yet: {found.proof}. {found.line} puts it into force."
    optimizers = {word: _own(names, word, optimizer) for word, optimizer in optimizers.items()}
    name = name if name.isidentifier() else _plain_name(names, model, name)
    document = code_report(plan, arguments.form, optimizers, name, model, names)
    document = document.and_lines([note] * bool(note))
    if arguments.save is None:
        display(document)
        return
    _write(arguments.save, document.data["code"], arguments.force)
    display(Document(f"Saved to {arguments.save}", (), document.to_dict()))


def _own(names: Mapping[str, Any], name: str, optimizer: Any) -> Any:
    """What the name stands for, a framework's wrapper perhaps."""
    try:
        value = lookup.value_of(names, name)
    except SpeedKitError:
        return optimizer
    return value if unwrapped(value) is optimizer else optimizer


def _plain_name(names: Mapping[str, Any], model: Any, name: str) -> str:
    """A variable that is the model: one is there before `trainer.model` is."""
    every = (word for word, value in list(names.items()) if value is model and word[:1] != "_")
    return next(every, EARLIER.sub("", name))


def _write(file: str, text: str, force: bool) -> None:
    """A new file; raises UsageError where one is there already, or can't be written."""
    try:
        with open(file, "w" if force else "x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise UsageError(f"{file} is there already: --force writes over it") from None
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None


def _add_options(parser: Parser) -> None:
    add_model(parser)
    add_optimizer(parser)
    about = "target framework (torch)"
    parser.option("--as", "FORM", about, words=FORMS, dest="form", default="torch")
    parser.option("--save", "FILE", "write it to a file")
    parser.switch("--force", "write over an existing FILE")


COMMAND = Command(
    "code",
    "the plan as code without SpeedKit: --as torch, yaml, accelerate, fabric, transformers",
    run,
    _add_options,
)
