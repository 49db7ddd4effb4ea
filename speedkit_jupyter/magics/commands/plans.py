"""%speedkit status, report, restore, catalog, explain, panel, code: plans and what is in force."""

from __future__ import annotations

from argparse import Namespace
from itertools import islice
from typing import Any

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.codegen.forms import FORMS, as_of_now, code_report
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.magics import namespace, options
from speedkit_jupyter.magics.line import Names, Option, command, switch
from speedkit_jupyter.optimizations import find
from speedkit_jupyter.plans.context import restore_all
from speedkit_jupyter.plans.preview import preview
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.plan_report import (
    catalog_report,
    context_report,
    explain_report,
    plan_report,
    status_report,
)
from speedkit_jupyter.session import Session
from speedkit_jupyter.support import lookup
from speedkit_jupyter.support.exceptions import SpeedKitError, did_you_mean
from speedkit_jupyter.support.words import count
from speedkit_jupyter.support.wrappers import unwrapped

# Models without a plan, for a first look.
MOST_MODELS = 3


@command("hardware, what is on, what is left on the table")
def status(names: Names, session: Session, arguments: Namespace) -> None:
    """Show plans that are applied, or else what applying would do."""
    applied = session.applied(names)
    trainable = (
        (name, model)
        for name, model in namespace.models(names).items()
        if next(model.parameters(), None) is not None
    )
    plans = [
        (name, namespace.planned_for(names, session, name)[2], session.found_for(model))
        for name, model in islice(trainable, 0 if applied else MOST_MODELS)
    ]
    display(status_report(Hardware.current(), applied, plans, session))


@command("each decision with its reason, and the flags before and after", options.MODEL)
def report(names: Names, session: Session, arguments: Namespace) -> None:
    """Show the decisions for one model, or for all that have a plan."""
    applied = session.applied(names)
    several = arguments.model is None and len(applied) > 1
    for wanted in [name for name, _ in applied] if several else [arguments.model]:
        name, context, plan = namespace.planned_for(names, session, wanted)
        if context is None:
            _, model = namespace.find_model(names, name)
            display(plan_report(plan, f"`{name}` (not applied)", session.found_for(model)))
        else:
            found = session.found_for(context.model)
            variable = session.variable_of(context)
            display(context_report(context, f"`{name}`", variable, found))


@command("put everything back")
def restore(names: Names, session: Session, arguments: Namespace) -> None:
    """Restore all models; name the flags that the user changed meanwhile, which stay."""
    applied = session.applied(names)
    number = restore_all()
    kept = [flag for _, context in applied for flag in context.kept]
    restored = ", ".join(f"`{name}`" for name, _ in applied) or count(number, "model")
    lines = [f"{flag}: you changed it meanwhile, so it was left alone" for flag in kept]
    headline = f"Restored {restored}" if number else "Nothing to restore"
    display(Document(headline, lines))


@command("all there is: what would be on, as is or declined", options.MODEL)
def catalog(names: Names, session: Session, arguments: Namespace) -> None:
    """Show the catalog for one model, or for any on this machine where there is none yet."""
    display(catalog_report(*namespace.planned_or_plain(names, session, arguments.model)))


@command(
    "what one optimization does, where it helps, its risk",
    Option("optimization", "NAME", "a name of the catalog, as gemm", options.catalog),
    options.MODEL,
)
def explain(names: Names, session: Session, arguments: Namespace) -> None:
    """Explain an entry, for one model."""
    optimization = find(arguments.optimization)
    if optimization is None:
        hint = did_you_mean(arguments.optimization, options.catalog(names))
        raise UsageError(f"no {arguments.optimization!r} in the catalog.{hint}")
    plan, name = namespace.planned_or_plain(names, session, arguments.model)
    display(explain_report(optimization, plan[optimization.name], name))


@command(
    "see, toggle and measure a model's plan with buttons",
    options.MODEL,
    options.OPTIMIZER,
    options.step("the function to measure; without it the last %%speedbench cell"),
)
def panel(names: Names, session: Session, arguments: Namespace) -> None:
    """Show the panel."""
    _, model = namespace.find_model(names, arguments.model)
    optimizers = namespace.find_optimizers(names, arguments.optimizer, model)
    found = arguments.step and namespace.find_function(names, arguments.step)
    # A plain name stays one: it means the function that has it when Measure is pressed.
    given_step = arguments.step if arguments.step in names else found
    # Without names the panel looks for them itself: an optimizer may be made after it is shown.
    given = list(optimizers.values()) if arguments.optimizer else None
    assert session.open_panel is not None
    display(session.open_panel(model, optimizer=given, step=given_step))


@command(
    "the plan as code without SpeedKit: --as torch, yaml, accelerate, fabric, transformers",
    options.MODEL,
    options.OPTIMIZER,
    Option("--as", "FORM", "target framework (torch)", words=FORMS, dest="form", default="torch"),
    Option("--save", "FILE", "write it to a file"),
    switch("--force", "write over an existing FILE"),
)
def code(names: Names, session: Session, arguments: Namespace) -> None:
    """Show the plan in force, or what apply would do; one that was tuned since comes first."""
    name, context, plan = namespace.planned_for(names, session, arguments.model)
    note = ""
    if context is None:
        model = namespace.find_model(names, name)[1]
        optimizers = namespace.find_optimizers(names, arguments.optimizer, model)
        plan = namespace.planned_for(names, session, name, optimizers)[2]
    else:
        model = context.model
        asked = arguments.optimizer and namespace.find_optimizers(names, arguments.optimizer, model)
        plan, listed = as_of_now(context, asked or {})
        optimizers = namespace.words_for(names, listed)
        found = session.found_for(model)
        is_other = found and found.config.to_dict() != context.config.to_dict()
        if found and found.proof and found.is_newer and is_other:
            plan = preview(model, found.config, listed).plan
            note = f"Tuned, and not in force yet: {found.proof}. {found.line} puts it into force."
    optimizers = {word: _own(names, word, optimizer) for word, optimizer in optimizers.items()}
    # A variable that is the model is there before `trainer.model` is.
    variables = (word for word, one in list(names.items()) if one is model and word[:1] != "_")
    name = name if name.isidentifier() else next(variables, name.partition(" (")[0])
    document = code_report(plan, arguments.form, optimizers, name, model, names)
    if arguments.save is None:
        display(document.and_lines([note]))
        return
    _write(arguments.save, document.data["code"], arguments.force)
    display(Document(f"Saved to {arguments.save}"))


def _own(names: Names, name: str, optimizer: Any) -> Any:
    """What the name stands for, a framework's wrapper perhaps."""
    try:
        value = lookup.value_of(names, name)
    except SpeedKitError:
        return optimizer
    return value if unwrapped(value) is optimizer else optimizer


def _write(file: str, text: str, force: bool) -> None:
    try:
        with open(file, "w" if force else "x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise UsageError(f"{file} is there already: --force writes over it") from None
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
