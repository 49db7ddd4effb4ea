"""%speedkit status, apply, restore, report, catalog, explain, panel, code: plans in words."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.catalog import CATALOG, find
from speedkit_jupyter.catalog.base.optimization import Optimization, choices
from speedkit_jupyter.codegen.forms import FORMS, as_of_now
from speedkit_jupyter.codegen.training_loop import Words
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.notebook import namespace, options
from speedkit_jupyter.notebook.options import Names, Option, command, switch
from speedkit_jupyter.notebook.panel.panel import Panel
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.plans import naming
from speedkit_jupyter.plans.applying import apply_speedups
from speedkit_jupyter.plans.config import SpeedConfig, from_arguments, from_word
from speedkit_jupyter.plans.context import SpeedContext, restore_all
from speedkit_jupyter.plans.naming import CTX, keep
from speedkit_jupyter.plans.own_kernels import WHEN_ADDED
from speedkit_jupyter.report import plan_report as reports
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.search.outcome import MEMORY
from speedkit_jupyter.step.variants import words as variants
from speedkit_jupyter.support import lookup
from speedkit_jupyter.support.exceptions import SpeedKitError, did_you_mean
from speedkit_jupyter.support.units import count
from speedkit_jupyter.support.wrappers import each_once, unwrapped


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
    switch("--likely", "the likely plan of the last search; it is not proven"),
    *_options(),
)
def apply(names: Names, session: Session, arguments: Namespace) -> None:
    models = namespace.find_models(names, arguments.model)
    config = SpeedConfig.from_yaml(arguments.config) if arguments.config else SpeedConfig()
    typed = _typed(arguments)
    config = from_arguments(config.to_dict() | typed, "%speedkit apply", firm=typed)
    asked, is_only = arguments.optimizer, len(models) == 1
    optimizers = {
        name: namespace.find_optimizers(names, asked, model, is_only)
        for name, model in models.items()
    }
    if arguments.likely:
        if typed or arguments.config or arguments.rules:
            raise UsageError("--likely takes the plan as it was tried: leave out other options")
        config = _likely(list(models.values()))
    elif not arguments.rules:
        every = each_once([one for held in optimizers.values() for one in held.values()])
        config = namespace.or_learned(config, list(models.values()), every)
    for name, model in models.items():
        _, context = apply_speedups(model, config, optimizer=list(optimizers[name].values()))
        show_applied(names, session, name, context, optimizers[name])


WHEN_ADDED.append(lambda entry: apply.extend(_options([entry])))


def _likely(models: list[Any]) -> SpeedConfig:
    """Return the likely plan of the last search, and say that it is not proven."""
    last = MEMORY.last
    config = last.likely_config if last and last.is_of(models) else None
    if last is None or config is None:
        raise UsageError(
            "the last search left no likely plan; without --likely, apply takes a proven one"
        )
    display(Document(f"Likely, not proven: {last.unclear}"))
    return config


def show_applied(
    names: Names,
    session: Session,
    name: str,
    context: SpeedContext,
    optimizers: dict[str, Any],
) -> None:
    """Put an applied context into the namespace, and show its plan."""
    variable = keep(session.names, name, context)
    document = reports.applied_report(context, Words(name, optimizers, variable, names))
    taken = f"`{CTX}` is in use: this context is `{variable}`." if variable != CTX else ""
    display(document.and_lines([taken]))


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
    applied = naming.applied(names)
    several = arguments.model is None and len(applied) > 1
    for wanted in [name for name, _ in applied] if several else [arguments.model]:
        name, context, plan = namespace.planned_for(names, wanted)
        if context is None:
            _, model = namespace.find_model(names, name)
            display(reports.plan_report(plan, f"`{name}` (not applied)", MEMORY.of(model)))
        else:
            found = MEMORY.of(context.model)
            display(reports.context_report(context, f"`{name}`", found))


@command("every optimization: on, as is or declined here", options.MODEL)
def catalog(names: Names, session: Session, arguments: Namespace) -> None:
    display(reports.catalog_report(*namespace.planned_or_plain(names, arguments.model)))


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
    plan, name = namespace.planned_or_plain(names, arguments.model)
    display(reports.explain_report(optimization, plan[optimization.name], name))


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
    name, context, plan = namespace.planned_for(names, arguments.model)
    if context is None:
        model = namespace.find_model(names, name)[1]
        optimizers = namespace.find_optimizers(names, arguments.optimizer, model)
        plan = namespace.planned_for(names, name, optimizers)[2]
    else:
        model = context.model
        asked = arguments.optimizer and namespace.find_optimizers(names, arguments.optimizer, model)
        plan, listed = as_of_now(context, asked or {})
        optimizers = namespace.words_for(names, listed)
    optimizers = {word: _own(names, word, optimizer) for word, optimizer in optimizers.items()}
    # A variable that is the model is there before `trainer.model` is.
    variables = (word for word, one in list(names.items()) if one is model and word[:1] != "_")
    name = name if name.isidentifier() else next(variables, name.partition(" (")[0])
    document = reports.code_report(plan, arguments.form, optimizers, name, model, names)
    if arguments.save is None:
        display(document)
        return
    _write(arguments.save, document.data["code"], arguments.force)
    display(Document(f"Saved to {arguments.save}"))


def _own(names: Names, name: str, optimizer: Any) -> Any:
    with suppress(SpeedKitError):
        if unwrapped(value := lookup.value_of(names, name)) is optimizer:
            return value
    return optimizer


def _write(file: str, text: str, force: bool) -> None:
    try:
        with open(file, "w" if force else "x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise UsageError(f"{file} is there already: --force writes over it") from None
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
