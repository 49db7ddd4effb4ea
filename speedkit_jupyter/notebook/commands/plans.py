"""%speedkit status, apply, restore, report, catalog, explain, panel, code: plans in words."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.catalog import CATALOG, find
from speedkit_jupyter.catalog.base.optimization import Optimization, choices
from speedkit_jupyter.codegen.forms import FORMS, as_of_now
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.notebook import namespace, options
from speedkit_jupyter.notebook.options import Names, Option, command, switch
from speedkit_jupyter.notebook.panel.panel import Panel
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.plans import naming
from speedkit_jupyter.plans.applying import apply_speedups
from speedkit_jupyter.plans.config import Origin, SpeedConfig, from_word
from speedkit_jupyter.plans.context import SpeedContext, restore_all
from speedkit_jupyter.plans.naming import CTX, keep
from speedkit_jupyter.plans.own_kernels import WHEN_ADDED
from speedkit_jupyter.report import plan_report as reports
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.search.outcome import MEMORY
from speedkit_jupyter.step.variants import words as variants
from speedkit_jupyter.support.exceptions import did_you_mean
from speedkit_jupyter.support.units import count
from speedkit_jupyter.support.wrappers import each_once


@command("hardware, plans in force, and plans that apply would make")
def status(names: Names, session: Session, arguments: Namespace) -> None:
    applied = naming.applied(names)
    models = {} if applied else namespace.whole_models(names)
    plans = [
        (name, namespace.planned_for(names, name)[2], MEMORY.of(model))
        for name, model in islice(models.items(), 3)  # enough for a first look
    ]
    display(reports.status_report(Hardware.current(), applied, plans, names))


# --- apply and restore ---


def _options(catalog: Iterable[Optimization] = CATALOG) -> Iterator[Option]:
    """Yield an option for each config field; further fields are `--field-part`."""
    for optimization in catalog:
        for number, (path, annotation) in enumerate(optimization.paths.items()):
            words, name, about = choices(annotation), optimization.name, optimization.summary
            if number:
                name, about = path.replace(".", "-"), f"{about}: its {path.partition('.')[2]}"
            bare: dict[str, Any] = {"nargs": "?", "const": "true"} if "true" in words else {}
            metavar = "WORD" if len(words) > 1 else "VALUE"
            yield Option(f"--{name}", metavar, about, words=words, dest=path, **bare)


def _typed(arguments: Namespace) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for path, annotation in (pair for one in CATALOG for pair in one.paths.items()):
        if (text := getattr(arguments, path)) is not None:
            name, _, field = path.partition(".")
            value = from_word(text, choices(annotation))
            values[name] = {**values.get(name, {}), field: value} if field else value
    return values


@command(
    "plan for a model and apply the plan",
    options.MODEL,
    options.OPTIMIZER,
    Option("--config", "FILE", "a YAML file to start from"),
    switch("--rules", "plan by rules, although tuning has learned a plan"),
    *_options(),
)
def apply(names: Names, session: Session, arguments: Namespace) -> None:
    words = [word for word in (arguments.model or "").split(",") if word] or [arguments.model]
    models = dict(namespace.find_model(names, word) for word in words)
    config = SpeedConfig.from_yaml(arguments.config) if arguments.config else SpeedConfig()
    typed = _typed(arguments)
    config = SpeedConfig(Origin("%speedkit apply", typed), **config.to_dict() | typed)
    asked, is_only, proven = arguments.optimizer, len(models) == 1, None
    optimizers = {
        name: namespace.find_optimizers(names, asked, model, is_only)
        for name, model in models.items()
    }
    if not arguments.rules:
        every = each_once([one for held in optimizers.values() for one in held.values()])
        proven = namespace.or_learned(SpeedConfig(), list(models.values()), every)
        config = proven if config.is_auto else config
    for name, model in models.items():
        _, context = apply_speedups(model, config, optimizer=list(optimizers[name].values()))
        show_applied(names, session, name, context, proven)


WHEN_ADDED.append(lambda entry: apply.extend(_options([entry])))


def show_applied(
    names: Names,
    session: Session,
    name: str,
    context: SpeedContext,
    proven: SpeedConfig | None = None,
) -> None:
    """Put a context into the namespace; show its plan, and the parts of `proven` that it drops."""
    variable = keep(session.names, name, context)
    lines = [f"`{CTX}` is in use: this context is `{variable}`."] if variable != CTX else []
    values = {} if proven is None else proven.to_dict()
    missing = [one.name for one in context.plan if one.name in values and not one.active]
    if missing:
        dropped = reports.spoken({name: values[name] for name in missing})
        told = f"Proven, and not in this plan: {dropped}"
        lines.append(f"{told}. `%speedkit apply {name}` applies the proven plan.")
    display(reports.applied_report(context, name, variable, names, lines))


@command("put everything back")
def restore(names: Names, session: Session, arguments: Namespace) -> None:
    applied = naming.applied(names)
    number = restore_all()
    kept = [flag for _, context in applied for flag in context.kept]
    restored = ", ".join(f"`{name}`" for name, _ in applied) or count(number, "model")
    lines = [f"{flag}: you changed it meanwhile, so it was left alone" for flag in kept]
    display(Document(f"Restored {restored}" if number else "Nothing to restore", lines))


# --- decisions and reasons ---


@command(
    "each decision with its reason, and the flags before and after",
    options.MODEL,
    switch("--notes", "instead the last measurement, with all of its notes"),
)
def report(names: Names, session: Session, arguments: Namespace) -> None:
    if arguments.notes:
        display(session.last_report or Document("Nothing was measured yet"))
        return
    applied = [name for name, _ in naming.applied(names)]
    for wanted in (applied if arguments.model is None else ()) or [arguments.model]:
        name, context, plan = namespace.planned_for(names, wanted)
        model = context.model if context else namespace.find_model(names, name)[1]
        display(reports.plan_report(context or plan, name, MEMORY.of(model)))


@command("every optimization: on, as is or declined here", options.MODEL)
def catalog(names: Names, session: Session, arguments: Namespace) -> None:
    name, plan = next(iter(namespace.plans_of(names, arguments.model).items()))
    display(reports.catalog_report(plan, name))


@command(
    "the purpose of one optimization, where it helps, its risk",
    Option("optimization", "NAME", "a name of the catalog, as gemm", options.catalog),
    options.MODEL,
)
def explain(names: Names, session: Session, arguments: Namespace) -> None:
    word = arguments.optimization
    optimization = find(word)
    if optimization is None:
        owner = "".join(f" It is a value of '{name}'." for name in variants().get(word, ()))
        hint = owner or did_you_mean(word, options.catalog(names))
        raise UsageError(f"no {word!r} in the catalog.{hint}")
    plans = namespace.plans_of(names, arguments.model)
    decisions = {name: plan[optimization.name] for name, plan in plans.items()}
    display(reports.explain_report(optimization, decisions))


@command(
    "see, toggle and measure a model's plan with buttons",
    options.MODEL,
    options.OPTIMIZER,
    options.step("the function to measure; without it the last %%speedbench cell"),
)
def panel(names: Names, session: Session, arguments: Namespace) -> None:
    _, model = namespace.find_model(names, arguments.model)
    optimizers = namespace.find_optimizers(names, arguments.optimizer, model)
    found = arguments.step and namespace.find_function(names, arguments.step)
    # A plain name stays one: it means the function that has it when Measure is pressed.
    step = arguments.step if arguments.step in names else found
    # Without names the panel looks for them itself: an optimizer may be made after it is shown.
    given = list(optimizers.values()) if arguments.optimizer else None
    display(Panel(model, optimizer=given, step=step))


# --- code ---


@command(
    "the plan as code without SpeedKit: --as torch, yaml, transformers",
    options.MODEL,
    options.OPTIMIZER,
    Option("--as", "FORM", "target framework (torch)", words=FORMS, dest="form", default="torch"),
    Option("--save", "FILE", "write it to a file"),
    switch("--force", "write over an existing FILE"),
)
def code(names: Names, session: Session, arguments: Namespace) -> None:
    asked = arguments.optimizer
    name, context, plan = namespace.planned_for(names, arguments.model, asked)
    model = context.model if context else namespace.find_model(names, name)[1]
    if context is None:
        optimizers = namespace.find_optimizers(names, asked, model)
    else:
        named = namespace.find_optimizers(names, asked, model) if asked else {}
        plan, listed = as_of_now(context, named)
        optimizers = namespace.words_for(names, listed)
    # A variable that is the model is there before `trainer.model` is.
    variables = (word for word, one in list(names.items()) if one is model and word[:1] != "_")
    name = name if name.isidentifier() else next(variables, name.partition(" (")[0])
    document = reports.code_report(plan, arguments.form, optimizers, name, model, names)
    if arguments.save is None:
        display(document)
        return
    try:
        with open(arguments.save, "w" if arguments.force else "x", encoding="utf-8") as file:
            file.write(document.data["code"])
    except FileExistsError:
        raise UsageError(f"{arguments.save} is there already: --force writes over it") from None
    except OSError as error:
        raise UsageError(f"{arguments.save}: {error.strerror}") from None
    display(Document(f"Saved to {arguments.save}"))
