"""%speedkit status, apply, restore, report, catalog, explain, panel, code, tuned and cache."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.catalog import CATALOG, find
from speedkit_jupyter.catalog.base.optimization import Optimization, choices
from speedkit_jupyter.codegen.forms import FORMS, as_of_now
from speedkit_jupyter.machines import compile_cache
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.notebook import namespace, options
from speedkit_jupyter.notebook.options import Names, Option, command, switch
from speedkit_jupyter.notebook.panel.panel import Panel
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.plans import naming
from speedkit_jupyter.plans.applying import apply_speedups
from speedkit_jupyter.plans.config import WHEN_ADDED, Origin, SpeedConfig, from_word
from speedkit_jupyter.plans.context import SpeedContext, restore_all
from speedkit_jupyter.plans.naming import CTX, assign
from speedkit_jupyter.plans.registry import contexts_of
from speedkit_jupyter.report import plan_report as reports
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.report.tuning_report import cache_report, tuned_list
from speedkit_jupyter.search.outcome import MEMORY
from speedkit_jupyter.step.variants import words as variants
from speedkit_jupyter.support import database
from speedkit_jupyter.support.exceptions import did_you_mean
from speedkit_jupyter.support.units import count, size
from speedkit_jupyter.support.wrappers import each_once


@command("hardware, plans in force, and plans that `apply` would make")
def status(names: Names, session: Session, arguments: Namespace) -> None:
    applied = naming.applied(names)
    models = {} if applied else namespace.whole_models(names)
    plans = [
        (name, namespace.planned_for(names, name)[2], MEMORY.of(model))
        for name, model in islice(models.items(), 3)  # more would fill the page
    ]
    display(reports.status_report(Hardware.current(), applied, plans))


# --- apply and restore ---


def _options(catalog: Iterable[Optimization] = CATALOG) -> Iterator[Option]:
    """Yield an option for each config field, such as `--compile` and `--compile-mode`."""
    for optimization in catalog:
        for number, (path, annotation) in enumerate(optimization.paths.items()):
            words, name, about = choices(annotation), optimization.name, optimization.summary
            if number:
                name, about = path.replace(".", "-"), f"{about}: its {path.partition('.')[2]}"
            bare: dict[str, Any] = {"nargs": "?", "const": "true"} if "true" in words else {}
            metavar = (not number and optimization.free) or ("WORD" if len(words) > 1 else "VALUE")
            yield Option(f"--{name}", metavar, about, words=words, dest=path, **bare)


@command(
    "plan for a model and apply the plan",
    options.MODEL,
    options.OPTIMIZER,
    Option("--config", "FILE", "a YAML file to start from"),
    switch("--rules", "plan by rules, although tuning has learned a plan"),
    switch("--likely", "the plan that the last tuning found likely, but could not prove"),
    *_options(),
)
def apply(names: Names, session: Session, arguments: Namespace) -> None:
    words = [word for word in (arguments.model or "").split(",") if word] or [arguments.model]
    found = [namespace.find_models(names, word) for word in words]
    models = {name: model for some in found for name, model in some.items()}
    config = SpeedConfig.from_yaml(arguments.config) if arguments.config else SpeedConfig()
    typed: dict[str, Any] = {}
    for path, annotation in (pair for one in CATALOG for pair in one.paths.items()):
        if (text := getattr(arguments, path)) is not None:
            name, _, field = path.partition(".")
            value = from_word(text, choices(annotation))
            typed[name] = {**typed.get(name, {}), field: value} if field else value
    config = SpeedConfig(Origin("%speedkit apply", firm=typed), **config.to_dict() | typed)
    asked, is_only, proven = arguments.optimizer, len(models) == 1, None
    optimizers = {
        name: namespace.find_optimizers(names, asked, model, is_only)
        for name, model in models.items()
    }
    if not arguments.rules:
        every = each_once([one for held in optimizers.values() for one in held.values()])
        proven = namespace.proven_config([*models.values()], every)
        config = proven if proven is not None and config.is_auto else config
    if arguments.likely:
        if typed or arguments.rules or arguments.config:
            raise UsageError("--likely is a whole plan: leave the other options out")
        if (likely := MEMORY.likely_config(models.values())) is None:
            raise UsageError("--likely: the last tuning found no likely plan for this model")
        config = likely
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
    """Assign a context to a variable. Show its plan, and the parts of `proven` that it lacks."""
    variable = assign(session.names, name, context)
    lines = [f"`{CTX}` is in use: this context is `{variable}`."] if variable != CTX else []
    values = {} if proven is None else proven.to_dict()
    missing = [one.name for one in context.plan if one.name in values and not one.active]
    if missing:
        dropped = reports.values_text({name: values[name] for name in missing})
        told = f"Proven, but not in this plan: {dropped}"
        lines.append(f"{told}. `%speedkit apply {name}` applies the proven plan.")
    display(reports.applied_report(context, name, variable, names, lines))


@command("put everything back, or one model", options.MODEL)
def restore(names: Names, session: Session, arguments: Namespace) -> None:
    applied = naming.applied(names)
    if arguments.model is None:
        number = restore_all()
    else:
        models = namespace.find_models(names, arguments.model).values()
        contexts = [context for model in models for context in contexts_of(model)]
        applied, number = [one for one in applied if one[1] in contexts], len(contexts)
        for context in contexts[::-1]:
            context.restore()
    kept = [flag for _, context in applied for flag in context.kept]
    restored = ", ".join(f"`{name}`" for name, _ in applied) or count(number, "model")
    lines = [f"{flag}: you changed it meanwhile, so it was left alone" for flag in kept]
    display(Document(f"Restored {restored}" if number else "Nothing to restore", lines))


# --- decisions and reasons ---


@command(
    "each decision with its reason, and the flags before and after",
    options.MODEL,
    switch("--notes", "show the last measurement instead, with all notes"),
)
def report(names: Names, session: Session, arguments: Namespace) -> None:
    if arguments.notes:
        display(session.last_report or Document("Nothing was measured yet"))
        return
    applied = [name for name, _ in naming.applied(names)] if arguments.model is None else []
    for wanted in applied or namespace.words_of_plans(names, arguments.model):
        name, context, plan = namespace.planned_for(names, wanted)
        model = context.model if context else namespace.find_model(names, name)[1]
        shown = reports.plan_report(context or plan, name, MEMORY.of(model))
        raced = "" if context else session.last_races.get(model, "")
        display(replace(shown, content=[raced, *shown.content]))


@command("every optimization: on, unchanged or declined here", options.MODEL)
def catalog(names: Names, session: Session, arguments: Namespace) -> None:
    name, plan = next(iter(namespace.plans_of(names, arguments.model).items()))
    display(reports.catalog_report(plan, name))


@command(
    "the purpose of one optimization, where it helps, its risk",
    Option("optimization", "NAME", "a name of the catalog, such as gemm", options.catalog),
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
    models, asked = namespace.find_models(names, arguments.model), arguments.optimizer
    found = arguments.step and namespace.find_function(names, arguments.step)
    # If the function is a variable, its current value is looked up when Measure is pressed.
    step = arguments.step if arguments.step in names else found
    for model in models.values():
        optimizers = namespace.find_optimizers(names, asked, model, len(models) == 1)
        # Without --optimizer, the panel finds optimizers at each use: some may be made later.
        display(Panel(model, optimizer=list(optimizers.values()) if asked else None, step=step))


# --- code ---


@command(
    "the plan as code without SpeedKit: --as torch, yaml, transformers",
    options.MODEL,
    options.OPTIMIZER,
    Option("--as", "FORM", "target framework (torch)", words=FORMS, dest="form", default="torch"),
    Option("--save", "FILE", "write the code to a file"),
    switch("--force", "overwrite an existing FILE"),
)
def code(names: Names, session: Session, arguments: Namespace) -> None:
    wanted = namespace.words_of_plans(names, arguments.model)
    if arguments.save is not None and len(wanted) > 1:
        raise UsageError(f"--save writes the code of one model. Which? {', '.join(wanted)}")
    for document in [_code_of(names, arguments, word) for word in wanted]:
        if arguments.save is None:
            display(document)
        else:
            _save(document.data["code"], arguments)


def _code_of(names: Names, arguments: Namespace, wanted: str | None) -> Document:
    asked = arguments.optimizer
    name, context, plan = namespace.planned_for(names, wanted, asked)
    model = context.model if context else namespace.find_model(names, name)[1]
    if context is None:
        optimizers = namespace.find_optimizers(names, asked, model)
    else:
        named = namespace.find_optimizers(names, asked, model) if asked else {}
        plan, listed = as_of_now(context, named)
        optimizers = namespace.words_for(names, listed)
    # Prefer a variable of the model, because `trainer.model` may not exist yet in new code.
    variables = (word for word, one in list(names.items()) if one is model and word[:1] != "_")
    name = name if name.isidentifier() else next(variables, name.partition(" (")[0])
    return reports.code_report(plan, arguments.form, optimizers, name, model, names)


def _save(code: str, arguments: Namespace) -> None:
    try:
        with open(arguments.save, "w" if arguments.force else "x", encoding="utf-8") as file:
            file.write(code)
    except FileExistsError:
        raise UsageError(f"{arguments.save} exists already: --force overwrites it") from None
    except OSError as error:
        raise UsageError(f"{arguments.save}: {error.strerror}") from None
    display(Document(f"Saved to {arguments.save}"))


@command(
    "the plans that tuning has learned; `tuned forget NUMBER` deletes one",
    options.action("list", "forget"),
    Option("which", "NUMBER", "for forget: the plan's number, or all", words=("all",), nargs="?"),
)
def tuned(names: Names, session: Session, arguments: Namespace) -> None:
    which = arguments.which
    if arguments.action == "list":
        display(tuned_list(database.learned()))
        return
    if which is None:
        raise UsageError("forget: which NUMBER? (or all; %speedkit tuned lists them)")
    numbers = [int(which)] if which.isdecimal() and len(which) < 19 else []
    number = database.unlearn(None if which == "all" else numbers)
    if not number and which != "all":
        raise UsageError(f"forget: there is no plan {which:.20}; %speedkit tuned lists them")
    display(Document(f"Forgot {count(number, 'learned plan')}"))


@command("the compiled code that is stored between sessions", options.action("status", "clear"))
def cache(names: Names, session: Session, arguments: Namespace) -> None:
    """Show the folder and size of the stored compiled code, or delete this code."""
    if arguments.action == "clear":
        display(Document(f"Deleted {size(compile_cache.clear())} of compiled code"))
    else:
        display(cache_report())
