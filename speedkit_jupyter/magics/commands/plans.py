"""%speedkit status, report, restore, catalog, explain, panel: plans and what is in force."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.magics import suggestions
from speedkit_jupyter.magics.line import Command, Names, Parser
from speedkit_jupyter.magics.namespace import (
    find_function,
    find_model,
    find_optimizers,
    models,
    named,
    planned,
    planned_or_plain,
)
from speedkit_jupyter.magics.options import MODEL, add_model, add_optimizer, add_step
from speedkit_jupyter.magics.progress import ProgressLine
from speedkit_jupyter.optimizations import find
from speedkit_jupyter.plans.context import SpeedContext, restore_all
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Section
from speedkit_jupyter.report.plan_report import (
    catalog_report,
    context_report,
    describe_call,
    explain_report,
    plan_report,
    status_report,
)
from speedkit_jupyter.session import Session
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.exceptions import did_you_mean
from speedkit_jupyter.support.tracebacks import lets_go
from speedkit_jupyter.support.words import count

if TYPE_CHECKING:
    from speedkit_jupyter.optimizations.base.optimization import Optimization
    from speedkit_jupyter.optimizations.facts.attention import Call, Measured

# Of models without a plan, so many for a first look.
MOST_MODELS = 3


def status(names: Names, session: Session, arguments: Namespace) -> None:
    """Show plans that are applied, or else what applying would do."""
    applied = session.applied(names)
    trainable = (
        (name, model)
        for name, model in models(names).items()
        if next(model.parameters(), None) is not None
    )
    plans = [
        (name, planned(names, session.config, name), session.found_for(model))
        for name, model in islice(trainable, 0 if applied else MOST_MODELS)
    ]
    hardware = Hardware.current()
    display(status_report(hardware, applied, plans, session.variable_of, session.found_for))


def report(names: Names, session: Session, arguments: Namespace) -> None:
    """Show the decisions for one model, or for all that have a plan."""

    def of_context(context: SpeedContext, name: str) -> Document:
        found = session.found_for(context.model)
        return context_report(context, f"`{name}`", session.variable_of(context), found)

    applied = dict(session.applied(names))
    several = arguments.model is None and len(applied) > 1
    chosen = list(applied) if several else [named(names, applied, arguments.model)]
    documents = {
        name: of_context(applied[name], name)
        if name in applied
        else plan_report(planned(names, session.config, name), f"`{name}` (not applied)")
        for name in chosen
    }
    if arguments.json:
        first = next(iter(documents.values()))
        every = {"models": {name: document.to_dict() for name, document in documents.items()}}
        print(first.to_json() if len(documents) == 1 else Document("", (), every).to_json())
        return
    for document in documents.values():
        display(document)


def _report_options(parser: Parser) -> None:
    add_model(parser, f"{MODEL}, or all that have a plan")
    parser.switch("--json", "one JSON document in place of tables")


def restore(names: Names, session: Session, arguments: Namespace) -> None:
    """Restore all models; name the flags that the user changed meanwhile, which stay."""
    applied = session.applied(names)
    number = restore_all()
    kept = [flag for _, context in applied for flag in context.kept]
    restored = ", ".join(f"`{name}`" for name, _ in applied) or count(number, "model")
    lines = [f"{flag}: you changed it meanwhile, so it was left alone" for flag in kept]
    headline = f"Restored {restored}" if number else "Nothing to restore"
    display(Document(headline, tuple(map(Section, lines)), {"restored": number}))


def catalog(names: Names, session: Session, arguments: Namespace) -> None:
    """Show the catalog for one model, or for any on this machine where there is none yet."""
    display(catalog_report(*planned_or_plain(names, session, arguments.model)))


@lets_go
def explain(names: Names, session: Session, arguments: Namespace) -> None:
    """Explain an entry, for one model; with a step, by what was measured on its own calls."""
    __tracebackhide__ = True
    optimization = find(arguments.optimization)
    if optimization is None:
        hint = did_you_mean(arguments.optimization, suggestions.optimizations(names))
        raise UsageError(f"%speedkit explain: no {arguments.optimization!r} in the catalog.{hint}")
    rows = () if arguments.step is None else _measured(names, optimization, arguments.step)
    plan, name = planned_or_plain(names, session, arguments.model)
    decision = plan[optimization.name]
    if rows:  # which a plan that is in force does not know of
        decision = replace(decision, evidence=rows)
    display(explain_report(optimization, decision, name))


def _measured(names: Names, optimization: Optimization, name: str) -> tuple[Measured, ...]:
    """Measure the attention kernels; they are kept beside the models, where plans find them."""
    __tracebackhide__ = True
    from speedkit_jupyter.measure.subject.from_function import step_of
    from speedkit_jupyter.tuning.attention import of_step

    step = step_of(find_function(names, name, "%speedkit explain"))
    if optimization.name != "sdpa":
        raise UsageError(
            f"%speedkit explain: --step is for sdpa: nothing of {optimization.name} depends on the "
            "calls of a step"
        )
    if not step.models:
        raise UsageError(f"%speedkit explain: {step.why_no_model('explain')}")
    left_out: list[Call] = []
    with ProgressLine(f"measuring the attention kernels on the calls of {name}"):
        rows = of_step(step, Hardware.current(), left_out=left_out)
    for call in dict.fromkeys(left_out):
        messages.note(f"left out, since measuring it takes too long: {describe_call(call)}")
    if not rows and not left_out:
        messages.note(
            f"{name} makes no call of scaled_dot_product_attention that more than one kernel takes."
        )
    return rows


def _explain_options(parser: Parser) -> None:
    parser.option(
        "optimization", "NAME", "a name of the catalog, as gemm", suggestions.optimizations
    )
    add_model(parser)
    add_step(parser, "sdpa: measure the kernels on the calls that this function makes")


def panel(names: Names, session: Session, arguments: Namespace) -> None:
    """Show the panel."""
    _, model = find_model(names, arguments.model)
    optimizers = find_optimizers(names, arguments.optimizer, model)
    step = arguments.step
    found_step = step and find_function(names, step, "%speedkit panel")
    # A plain name stays one: it means the function that has it when Measure is pressed.
    given_step = step if step in names else found_step
    assert session.open_panel is not None
    # Without names the panel looks for them itself: an optimizer may be made after it is shown.
    given = list(optimizers.values()) if arguments.optimizer else None
    display(session.open_panel(model, optimizer=given, step=given_step))


def _panel_options(parser: Parser) -> None:
    add_model(parser)
    add_optimizer(parser)
    add_step(parser, "the function to measure; without it the last %%speedbench cell")


STATUS = Command("status", "hardware, what is on, what is left on the table", status)
REPORT = Command(
    "report", "each decision with its reason, and the flags before and after", report,
    _report_options,
)  # fmt: skip
RESTORE = Command("restore", "put everything back", restore)
CATALOG = Command(
    "catalog", "all there is: what would be on, as is or declined", catalog, add_model
)
EXPLAIN = Command(
    "explain", "what one optimization does, where it helps, its risk", explain, _explain_options
)
PANEL = Command(
    "panel", "see, toggle and measure a model's plan with buttons", panel, _panel_options
)
