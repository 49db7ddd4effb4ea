"""%speedkit: each subcommand parses, calls the core and displays."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.config import SpeedConfig, from_arguments
from speedkit_jupyter.context import SpeedContext, apply_speedups, restore_all
from speedkit_jupyter.exceptions import SpeedKitError, did_you_mean
from speedkit_jupyter.magics import parsing
from speedkit_jupyter.magics.code import code, named, planned
from speedkit_jupyter.magics.help import help_page
from speedkit_jupyter.magics.namespace import (
    find_function,
    find_model,
    find_optimizers,
    holding_trainer,
    is_variable,
    models,
)
from speedkit_jupyter.magics.wishes import or_learned
from speedkit_jupyter.report.document import Code, Document, Section
from speedkit_jupyter.report.units import count
from speedkit_jupyter.session import CTX, Session, is_free

Names = MutableMapping[str, Any]


def run(names: Names, session: Session, line: str) -> None:
    """One `%speedkit` line; whatever is wrong with it is one UsageError."""
    words = parsing.split(line)
    command = words[0] if words else "status"
    if command.startswith("-"):
        command, rest = "status", line
    else:
        rest = line.strip()[len(command) :]
    if command not in parsing.SUBCOMMANDS:
        hint = did_you_mean(command, parsing.SUBCOMMANDS)
        raise UsageError(f"%speedkit: unknown subcommand {command!r}.{hint} See %speedkit help")
    try:
        COMMANDS[command](names, session, rest)
    except (SpeedKitError, TypeError) as error:
        if not isinstance(error, SpeedKitError) and not str(error).startswith(("apply_", "opt")):
            raise
        raise UsageError(str(error)) from None


def status(names: Names, session: Session, line: str) -> None:
    """Hardware, what is on, and what is left on the table."""
    from speedkit_jupyter.hardware import Hardware
    from speedkit_jupyter.report.plans import status_report

    _no_arguments("status", line)
    applied = session.applied(names)
    first = [] if applied else _first_models(names)
    plans = [(name, planned(names, session.config, name)) for name in first]
    display(status_report(Hardware.current(), applied, plans, session.variable_of))


def report(names: Names, session: Session, line: str) -> None:
    """Each decision with its reason, and the flags before and after."""
    from speedkit_jupyter.report.plans import context_report, plan_report

    arguments = parsing.report_parser().parse_line(line)
    applied = dict(session.applied(names))
    if arguments.model is None and len(applied) > 1:
        chosen = list(applied)
    else:
        chosen = [named(names, applied, arguments.model)]
    documents = {
        name: context_report(applied[name], f"`{name}`", session.variable_of(applied[name]))
        if name in applied
        else plan_report(planned(names, session.config, name), f"`{name}` (not applied)")
        for name in chosen
    }
    if arguments.json:
        one = next(iter(documents.values()))
        every = {"models": {name: each.to_dict() for name, each in documents.items()}}
        print(one.to_json() if len(documents) == 1 else Document("", (), every).to_json())
        return
    for document in documents.values():
        display(document)


def apply(names: Names, session: Session, line: str) -> None:
    """Plan for a model, apply the plan, put the context into the namespace."""
    from speedkit_jupyter.report.plans import applied_report
    from speedkit_jupyter.report.training_loop import Words

    arguments = parsing.apply_parser().parse_line(line)
    name, model = find_model(names, arguments.model)
    _check_free(session, arguments.ctx, model)
    config = SpeedConfig.from_yaml(arguments.config) if arguments.config else session.config
    typed = parsing.config_values(arguments)
    config = from_arguments(config.to_dict() | typed, "%speedkit apply", firm=typed)
    optimizers = find_optimizers(names, arguments.optimizer, model)
    if not arguments.rules:
        config = or_learned(config, model, list(optimizers.values()))
    _, context = apply_speedups(model, config, optimizer=list(optimizers.values()))
    variable = session.keep(name, context, arguments.ctx)
    document = applied_report(context, Words(name, optimizers, variable))
    if arguments.ctx is None and variable != CTX:
        document = document.and_lines([f"`{CTX}` is in use: this context is `{variable}`."])
    if trainer := holding_trainer(names, model):
        arguments_of_it = f"`%speedkit code {name} --as transformers` writes the plan as arguments"
        own_loop = f"`{trainer}` runs a loop of its own, not the one above: {arguments_of_it}."
        document = document.and_lines([own_loop])
    display(document)


def panel(names: Names, session: Session, line: str) -> None:
    """Buttons for a model's plan."""
    arguments = parsing.panel_parser().parse_line(line)
    _, model = find_model(names, arguments.model)
    found = find_optimizers(names, arguments.optimizer, model)
    step = arguments.step
    found_step = step and find_function(names, step, "%speedkit panel")
    # A plain name stays one: it means the function that has it when Measure is pressed.
    given_step = step if step in names else found_step
    assert session.open_panel is not None
    # Without names the panel looks for them itself: an optimizer may be made after it is shown.
    given = list(found.values()) if arguments.optimizer else None
    display(session.open_panel(model, optimizer=given, step=given_step))


def restore(names: Names, session: Session, line: str) -> None:
    """Put everything back."""
    _no_arguments("restore", line)
    applied = session.applied(names)
    number = restore_all()
    kept = [flag for _, context in applied for flag in context.kept]
    restored = ", ".join(f"`{name}`" for name, _ in applied) or count(number, "model")
    lines = [f"{flag}: you changed it meanwhile, so it was left alone" for flag in kept]
    headline = f"Restored {restored}" if number else "Nothing was applied, so nothing is to restore"
    display(Document(headline, tuple(Section(one) for one in lines), {"restored": number}))


def config(names: Names, session: Session, line: str) -> None:
    """Show, load or save what apply starts from."""
    arguments = parsing.config_parser().parse_line(line)
    if arguments.action in ("load", "save") and not arguments.file:
        raise UsageError(f"%speedkit config {arguments.action}: which FILE?")
    if arguments.action == "load":
        session.config = SpeedConfig.from_yaml(arguments.file)
    if arguments.action == "reset":
        session.config = SpeedConfig()
    if arguments.action == "save":
        try:
            session.config.to_yaml(arguments.file)
        except OSError as error:
            raise UsageError(f"{arguments.file}: {error.strerror}") from None
    headline = {
        "show": "This session's config; `%speedkit apply` starts from it",
        "load": f"Loaded {arguments.file}; `%speedkit apply` starts from it",
        "reset": "Everything is auto again",
        "save": f"Saved to {arguments.file}",
    }[arguments.action]
    body = Code(session.config.to_yaml().rstrip())
    display(Document(headline, (Section(body),), session.config.to_dict()))


def history(names: Names, session: Session, line: str) -> None:
    """Saved benchmarks."""
    from speedkit_jupyter import store
    from speedkit_jupyter.report.histories import history_list, history_report

    arguments = parsing.history_parser().parse_line(line)
    skipped: list[str] = []
    if arguments.name is None:
        if arguments.forget:
            raise UsageError("%speedkit history --forget: which NAME?")
        display(history_list(store.saved(skipped=skipped)).and_lines(skipped))
        return
    if arguments.forget and (number := store.forget(arguments.name)):
        display(Document(f"Deleted {count(number, 'result')} of {arguments.name}"))
        return
    kept = store.saved(arguments.name, skipped)
    if not (kept or skipped):
        known = list(dict.fromkeys(one.name for one in store.saved()))
        hint = did_you_mean(arguments.name, known)
        raise UsageError(f"%speedkit history: nothing is saved as {arguments.name!r}.{hint}")
    nothing = Document(f"{arguments.name}: no result that can be read")
    display((history_report(kept) if kept else nothing).and_lines(skipped))


def verify(names: Names, session: Session, line: str) -> None:
    """Loss curves with and without a plan, for the last %%speedbench cell or a function."""
    from speedkit_jupyter.magics.verify import run as run_verify

    run_verify(names, session, parsing.verify_parser().parse_line(line))


def tuned(names: Names, session: Session, line: str) -> None:
    """Plans that tuning has learned."""
    from speedkit_jupyter import store
    from speedkit_jupyter.report.tunings import tuned_list

    arguments = parsing.tuned_parser().parse_line(line)
    skipped: list[str] = []
    if arguments.action == "list":
        if arguments.which:
            raise UsageError(f"%speedkit tuned list takes no more words, not {arguments.which!r}")
        display(tuned_list(store.learned(skipped=skipped)).and_lines(skipped))
        return
    which = arguments.which
    if which is None:
        raise UsageError("%speedkit tuned forget: which NUMBER? (or all; %speedkit tuned lists)")
    numbers = [int(which)] if which.isdecimal() and len(which) < 10 else []
    number = store.unlearn(None if which == "all" else numbers)
    if not number and which != "all":
        raise UsageError(f"%speedkit tuned forget: there is no plan {which}; %speedkit tuned lists")
    display(Document(f"Forgot {count(number, 'learned plan')}"))


def repair(names: Names, session: Session, line: str) -> None:
    """Make torch's two TF32 APIs agree."""
    from speedkit_jupyter import flags

    _no_arguments("repair", line)
    mixed = flags.repair()
    text = "The two agree again; TF32 stays on where it was on" if mixed else "Nothing to repair"
    display(Document(f"torch's TF32 settings: {text}", (), {"repaired": mixed}))


def help_(names: Names, session: Session, line: str) -> None:
    """Subcommands and every option, or those of one."""
    display(help_page(parsing.help_parser().parse_line(line).topic))


COMMANDS = {
    "status": status,
    "report": report,
    "apply": apply,
    "code": code,
    "restore": restore,
    "panel": panel,
    "config": config,
    "history": history,
    "tuned": tuned,
    "verify": verify,
    "repair": repair,
    "help": help_,
}


def _first_models(names: Names) -> list[str]:
    """Up to three models with parameters, for a first look."""
    found = [n for n, m in models(names).items() if next(m.parameters(), None) is not None]
    return found[:3]


def _check_free(session: Session, name: str | None, model: Any) -> None:
    """Refuse to overwrite anything but what the new context takes the place of."""
    if name is None:  # then it gets a free one
        return
    if not is_variable(name):
        raise UsageError(f"%speedkit apply: --ctx {name!r} is no name for a variable of yours")
    taken = (session.names or {}).get(name)
    if is_free(taken, model):
        return
    whose = f"your {type(taken).__name__}"
    if isinstance(taken, SpeedContext):
        other = next((n for n, one in session.contexts.items() if one is taken), "another model")
        whose = f"the context of {other}, which is in force"
    raise UsageError(f"%speedkit apply: {name} is {whose}; name this context with --ctx")


def _no_arguments(command: str, line: str) -> None:
    if line.strip():
        raise UsageError(f"%speedkit {command} takes no arguments, not {line.strip()!r}")
