"""Reports about plans and the catalog: what is decided and why, and what an entry does."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from speedkit_jupyter.codegen.training_loop import Words, loop
from speedkit_jupyter.machines.flags import Change
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations import named
from speedkit_jupyter.optimizations.base.decision import Decision
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.plans.applying import to_write, trained_by
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.planning import Plan, describe
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Cell, Code, Row, Section, Table, Tone
from speedkit_jupyter.report.units import size, word
from speedkit_jupyter.session import Found, Session
from speedkit_jupyter.support.words import count

# Names in one line.
MOST_NAMES = 12
SOURCES = {"auto": "auto", "user": "you", "env": "environment", "measured": "measured"}
NO_MODEL = (
    "No model here yet. Define one, then `%speedkit apply model`; `%speedkit help` lists the rest."
)


def hardware_line(hardware: Hardware, device: str = "cpu") -> str:
    """Return the machine in one line."""
    gpu = hardware.accelerator(device)
    memory = hardware.cpu.memory_bytes if gpu is None else gpu.memory_bytes
    idle = [f"{one.name} idle" for one in hardware.accelerators if gpu is None]
    sizes = [size(memory)] if memory else []
    versions = [f"torch {hardware.torch}", f"Python {hardware.python}"]
    return ", ".join([describe(hardware, device), *sizes, *idle, *versions])


def spoken(values: Mapping[str, Any] | Iterable[Decision]) -> str:
    """Return what is on, or offered, in the words of options: `precision bf16, channels_last`."""
    if not isinstance(values, Mapping):
        values = {decision.name: decision.value for decision in values if decision.active}
    return ", ".join(k if v is True else f"{k} {word(v)}" for k, v in values.items())


def plan_report(plan: Plan, name: str = "model", found: Found | None = None) -> Document:
    """Return what would be decided for a model; nothing is applied."""
    return Document(
        f"Plan for {name} on {hardware_line(plan.hardware, plan.facts.device)}",
        [decisions(plan), worth_measuring(plan, found)],
    )


def context_report(
    context: SpeedContext, name: str = "model", ctx: str = "ctx", found: Found | None = None
) -> Document:
    """Return each decision with its reason, and the flags before and after."""
    content = [
        decisions(context.plan, context.restored),
        worth_measuring(context.plan, found),
        Section(changed(context.changes()), "Before and after"),
        _notes(context, ctx),
    ]
    return Document(_headline(context, name), content)


def applied_report(context: SpeedContext, words: Words) -> Document:
    """Return what to write in the user's loop, what applying did, and the loop to paste."""
    plan = context.plan
    left = plan.config.why_left
    again = "`--rules` applies what the rules say, `%%speedbench --tune` searches again."
    content = [
        _of_interest(plan),
        f"{left.capitalize()}. {again}" if left else _as_is(plan),
        worth_measuring(plan),
        Section(changed(context.changes()), "Before and after"),
        _notes(context, words.ctx),
        _loop(context, words),
    ]
    write = to_write(context, words.ctx, words.names)
    headline = f"{write} {_headline(context, words.model)}".lstrip()
    return Document(headline, content)


def _loop(context: SpeedContext, words: Words) -> Section:
    """What to paste, or that there is nothing to edit."""
    title = "Your predictions" if context.plan["inference"].active else "Your training loop"
    if library := trained_by(context.model, words.names):
        text = f"{library} runs its own loop."
        if library == "transformers":
            text += (
                f" `%speedkit code {words.model} --as transformers` writes the plan as arguments."
            )
        return Section(text, title)
    lines = loop(context, words)
    nothing = "Nothing to edit: it runs under the plan as it is."
    return Section(Code(lines) if lines else nothing, title)


def status_report(
    hardware: Hardware,
    contexts: Sequence[tuple[str, SpeedContext]],
    planned: Iterable[tuple[str, Plan, Found | None]] = (),
    session: Session | None = None,
) -> Document:
    """Return hardware, what is on, and what is left on the table."""
    content: list[Any] = []
    for name, context in contexts:
        idle = [(d.name, d.reason) for d in context.plan if d.declined and not d.active]
        content += [
            f"{_state(context, name)}.",
            _notes(context, session.variable_of(context) if session else "ctx"),
            Section(Table(("optimization", "why"), idle), "Declined"),
            _as_is(context.plan),
            worth_measuring(context.plan, session.found_for(context.model) if session else None),
        ]
    for name, plan, found in planned:
        shown = _of_interest(plan) or "Nothing here is known to help."
        content += [Section(shown, f"`%speedkit apply {name}` would do this")]
        content += [_as_is(plan), worth_measuring(plan, found)]
    device = contexts[0][1].plan.facts.device if contexts else "cpu"
    return Document(f"SpeedKit · {hardware_line(hardware, device)}", content or [NO_MODEL])


def decisions(plan: Iterable[Decision], restored: bool = False) -> Table:
    """Return one row per optimization: state, value, who decided, and why."""
    rows = []
    for one in plan:
        state, tone = outcome(one, restored)
        cells = (called(one), state, word(one.value), SOURCES[one.source], one.reason)
        rows.append(Row(cells, tone))
    return Table(("optimization", "state", "value", "by", "why"), rows)


def called(decision: Decision) -> Cell:
    """Return the name of an optimization, with what it does as a tooltip."""
    return Cell(decision.name, hint=named(decision.name).summary)


def worth_measuring(plan: Plan, found: Found | None = None) -> str:
    """Return a line for all that may pay here and waits until it is measured; empty without.

    Where tuning has measured it, the line says what was found in place of the plan.
    """
    if found is None:
        offer = f"Worth measuring here: {spoken(plan.worth_measuring)}: `%%speedbench --tune`"
        return offer if plan.worth_measuring else ""
    if found.config.to_dict() == plan.config.to_dict():
        return ""  # each of its decisions says that it was measured
    if found.proof:
        return f"Tuned: {found.proof}. {found.line} puts it into force."
    rest = f" {found.line} takes this plan off." if plan.active_values() else ""
    return f"Tuned: nothing was proven faster than without a plan.{rest}"


def _of_interest(plan: Plan) -> Table:
    """The decisions that do something, or that somebody has asked for."""
    return decisions(decision for decision in plan if decision.active or decision.declined)


def _as_is(plan: Plan) -> str:
    """A line for what nothing is done about; of a large catalog the first of them."""
    names = [decision.name for decision in plan if not (decision.active or decision.declined)]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    listed = f"{', '.join(names[:MOST_NAMES])}{more}"
    return f"As is: {listed}. `%speedkit report` has every reason." if names else ""


def changed(changes: Sequence[Change]) -> Table | str:
    """Return every flag and piece of state that differs."""
    rows = [(c.name, word(c.before), word(c.after)) for c in changes]
    same = "Every flag, the model and its optimizers are as they were."
    return Table(("flag or state", "before", "after"), rows) if rows else same


def outcome(decision: Decision, restored: bool = False) -> tuple[str, Tone]:
    """Return the state of a decision, with a sign before the word, and its tone."""
    if decision.active and restored:
        return "○ was on", "quiet"
    if decision.active:
        return ("◐ replaced", "plain") if decision.declined else ("● on", "good")
    return ("✕ declined", "bad") if decision.declined else ("○ as is", "quiet")


def _headline(context: SpeedContext, name: str) -> str:
    plan = context.plan
    machine = hardware_line(plan.hardware, plan.facts.device)
    return f"{_state(context, name)} on {machine} ({count(plan.facts.parameters, 'parameter')})"


def _state(context: SpeedContext, name: str) -> str:
    if context.restored:
        return f"Restored: {name}"
    words = spoken(context.plan) or "nothing, since nothing here is known to help"
    return f"{'Applied to' if context.active else 'Waiting for'} {name}: {words}"


def _notes(context: SpeedContext, ctx: str) -> Section:
    lines = [f"{name}: {note}" for name, note in context.notes.items()]
    precision = context.plan["precision"]
    if context.active and precision.active and not context.autocast_entered:
        where = f"where your forward pass runs inside {ctx}.autocast(), or another autocast"
        lines.append(f"precision: {precision.value} acts {where}")
    lines += [f"{flag}: you changed it meanwhile, so it was left alone" for flag in context.kept]
    return Section("\n".join(lines), "Please note")


def catalog_report(plan: Plan, name: str) -> Document:
    """Return every entry: what it does, and what would be on, as is or declined here."""
    rows = []
    for one in plan:
        state, tone = outcome(one)
        rows.append(
            Row((one.name, named(one.name).summary, state, word(one.value), one.reason), tone)
        )
    columns = ("optimization", "what it does", "state", "value", "why")
    more = "`%speedkit explain NAME` says where one helps, its risk, and how it is undone."
    return Document(
        f"The catalog for {name} on {hardware_line(plan.hardware, plan.facts.device)}",
        [
            Table(columns, rows, wraps=("what it does",), least_last=38),
            worth_measuring(plan),
            more,
        ],
    )


def explain_report(optimization: Optimization, decision: Decision, name: str) -> Document:
    """Return one entry, and what is decided about it for this model."""
    state, _ = outcome(decision)
    values = [f"{name}: {info.description}" for name, info in optimization.fields.items()]
    if values:  # the first field has the name of the entry
        values[0] = values[0].partition(": ")[2]
    about = {
        "what": " ".join(inspect.cleandoc(optimization.__doc__ or "").split()),
        "helps": optimization.helps,
        "risk": optimization.risk,
        "numbers": optimization.effect.value,
        "undone": optimization.undone,
        "values": "; ".join(values) or ", ".join(optimization.words) or optimization.free,
        "here": f"{name} {state.partition(' ')[2]}: {word(decision.value)}; {decision.reason}",
        "more": optimization.page,
    }
    headline = f"{optimization.name}: {optimization.summary}"
    return Document(headline, [Table(("", ""), list(about.items()))])
