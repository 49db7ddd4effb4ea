"""Reports about plans: status, decisions with reasons, the catalog, a panel's state, and code."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from speedkit_jupyter import machines
from speedkit_jupyter.catalog import named
from speedkit_jupyter.catalog.base.decision import Decision
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.codegen.forms import code
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.applying import Preview, trained_by
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.report.elements import CodeBlock, Row, Section, Table, TableCell, Tone
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.search.outcome import MEMORY, Tuning
from speedkit_jupyter.support.units import count, size, word

if TYPE_CHECKING:
    from speedkit_jupyter.codegen.script import Optimizers

COLUMNS = ("optimization", "state", "value", "by", "why")
IN_CATALOG = ("optimization", "what it does", "state", "value", "why")
IN_PANEL = ("optimization", "state", "value", "why")
# State and tone of an active decision in a plan that is, was, or would be in force.
ON: tuple[str, Tone] = ("● on", "good")
WAS_ON: tuple[str, Tone] = ("○ was on", "quiet")
WOULD: tuple[str, Tone] = ("→ on", "good")
SOURCES = {"user": "you", "env": "environment"}
NO_MODEL = "No model here yet. Define one, then `%speedkit apply model`; see `%speedkit help`."


def _machine(hardware: Hardware, device: str = "cpu") -> str:
    gpu = hardware.accelerator(device)
    memory = hardware.cpu.memory_bytes if gpu is None else gpu.memory_bytes
    idle = [f"{one.name} idle" for one in hardware.accelerators if gpu is None]
    sizes = [size(memory)] if memory else []
    versions = [f"torch {hardware.torch}", f"Python {hardware.python}"]
    return ", ".join([hardware.describe(device), *sizes, *idle, *versions])


def values_text(values: Mapping[str, Any] | Iterable[Decision]) -> str:
    """Return values by name, or active decisions, as text: `precision bf16, channels_last`."""
    if not isinstance(values, Mapping):
        values = {decision.name: decision.value for decision in values if decision.active}
    return ", ".join(k if v is True else f"{k} {word(v)}" for k, v in values.items())


def plan_report(
    made: Plan | SpeedContext, name: str = "model", found: Tuning | None = None
) -> Document:
    """Return a report of a plan's decisions. For a context, add the changes and notes."""
    if isinstance(made, SpeedContext):
        table = decision_table(made.plan, on=WAS_ON if made.restored else ON)
        content = [table, worth_measuring(made.plan, found), _changed(made), _notes(made)]
        return Document(_headline(made, f"`{name}`"), content)
    headline = f"Plan for `{name}` (not applied) on {_machine(made.hardware, made.facts.device)}"
    return Document(headline, [decision_table(made, on=WOULD), worth_measuring(made, found)])


def applied_report(
    context: SpeedContext, name: str, variable: str, names: Mapping[str, Any], lines: Sequence[str]
) -> Document:
    """Return the report of `apply`: decisions, edits that the user's loop needs, and changes.

    `name` is the model's expression, `variable` the context's variable, and `names` has all
    variables of the notebook. `lines` are appended.
    """
    plan = context.plan
    again = "`--rules` applies the plan by rules, `%%speedbench --tune` searches again."
    left = plan.config.why_left and f"{plan.config.why_left.capitalize()}. {again}"
    body = "Nothing to edit: it runs under the plan as it is."
    if plan["device"].active:
        body = f"Move each batch with `.to({variable}.device)`; the rest stays as it is."
    if library := trained_by(context.model, names):
        line = f"`%speedkit code {name} --as {library}` writes the plan as arguments."
        body = f"{library} runs its own loop.{f' {line}' * (library == 'transformers')}"
    title = "Your predictions" if plan["inference"].active else "Your training loop"
    content = [
        _active_or_declined(plan),
        _notes(context),
        Section(body, title),
        left or worth_measuring(plan) or "`%speedkit report` has every reason.",
        _changed(context),
        *lines,
    ]
    return Document(_headline(context, name), content, is_brief=True)


def status_report(
    hardware: Hardware,
    contexts: Sequence[tuple[str, SpeedContext]],
    planned: Iterable[tuple[str, Plan, Tuning | None]] = (),
) -> Document:
    """Return a report of the hardware, plans in force, and plans that `apply` would make."""
    content: list[Any] = []
    for name, context in contexts:
        declined = [one for one in context.plan if one.declined and not one.active]
        content += [
            f"{_state(context, name)}.",
            _notes(context),
            Section(decision_table(declined, ("optimization", "why")), "Declined"),
            _as_is(context.plan),
            worth_measuring(context.plan, MEMORY.of(context.model)),
        ]
    for name, plan, found in planned:
        shown = _active_or_declined(plan) or "Nothing here is known to help."
        content += [Section(shown, f"`%speedkit apply {name}` would do this")]
        content += [_as_is(plan), worth_measuring(plan, found)]
    device = contexts[0][1].plan.facts.device if contexts else "cpu"
    return Document(f"SpeedKit · {_machine(hardware, device)}", content or [NO_MODEL])


def decision_table(
    made: Iterable[Decision],
    columns: tuple[str, ...] = COLUMNS,
    on: tuple[str, Tone] = ON,
    pending: Preview | None = None,
    **more: Any,
) -> Table:
    """Return a table with a row for each decision; mark changes that `pending` would make."""
    rows = []
    for one in made:
        state, tone = outcome(one, on)
        value, summary = word(one.value), named(one.name).summary
        if pending is not None:
            state, value = _marked(pending, one, state)
        cells = {
            "optimization": TableCell(one.name, hint=summary),
            "what it does": summary,
            "state": state,
            "value": value,
            "by": SOURCES.get(one.source, one.source),
            "why": one.reason,
        }
        rows.append(Row(tuple(cells[name] for name in columns), tone))
    return Table(columns, rows, **more)


def outcome(decision: Decision, on: tuple[str, Tone] = ON) -> tuple[str, Tone]:
    """Return a decision's state, such as `○ as is`, and its tone. Active decisions get `on`."""
    if decision.active:
        return ("◐ replaced", "plain") if decision.declined and on == ON else on
    return ("✕ declined", "bad") if decision.declined else ("○ as is", "quiet")


def worth_measuring(plan: Plan, found: Tuning | None = None) -> str:
    """Return a line about the tuning result `found` or, without one, about values to measure."""
    if found is None:
        offer = f"Worth measuring here: {values_text(plan.worth_measuring)}: `%%speedbench --tune`"
        return offer if plan.worth_measuring else ""
    if found.config.to_dict() == plan.config.to_dict():
        return ""  # the plan shows the measured reasons
    if found.proof:
        return f"Tuned: {found.proof}. {found.line} puts it in force."
    rest = f" {found.line} takes this plan off." if plan.active_values() else ""
    return f"Tuned: nothing was proven faster than without a plan.{rest}"


def _active_or_declined(plan: Plan) -> Table:
    return decision_table(decision for decision in plan if decision.active or decision.declined)


def _as_is(plan: Plan) -> str:
    number = sum(not (decision.active or decision.declined) for decision in plan)
    return f"{number} more are as they are; `%speedkit report` has every reason." if number else ""


def _changed(context: SpeedContext) -> Section:
    rows = [(one.name, word(one.before), word(one.after)) for one in context.changes()]
    same = "Every flag, the model and the optimizers of the plan are as they were."
    table = Table(("flag or state", "before", "after"), rows)
    return Section(table or same, "Before and after", folded=True)


def _headline(context: SpeedContext, name: str) -> str:
    plan, parameters = context.plan, count(context.plan.facts.parameters, "parameter")
    return f"{_state(context, name)} on {_machine(plan.hardware, plan.facts.device)} ({parameters})"


def _state(context: SpeedContext, name: str) -> str:
    if context.restored:
        return f"Restored: {name}"
    words = values_text(context.plan) or "nothing, since nothing here is known to help"
    return f"{'Applied to' if context.active else 'Waiting for'} {name}: {words}"


def _notes(context: SpeedContext) -> Section:
    lines = [f"{name}: {note}" for name, note in context.notes.items()]
    lines += [f"{flag}: you changed it meanwhile, so it was left alone" for flag in context.kept]
    return Section("\n".join(lines), "Please note")


# --- the catalog ---


def catalog_report(plan: Plan, name: str) -> Document:
    table = decision_table(plan, IN_CATALOG, wraps=("what it does",), least_last=38)
    more = "`%speedkit explain NAME` says where a switch helps, and its risk."
    headline = f"The catalog for {name} on {_machine(plan.hardware, plan.facts.device)}"
    return Document(headline, [table, worth_measuring(plan), more])


def explain_report(optimization: Optimization, decisions: Mapping[str, Decision]) -> Document:
    """Return a report of an optimization: the description, and the `decisions` by model name."""
    values = [f"{name}: {info.description}" for name, info in optimization.fields.items()]
    about = {
        "what": " ".join(inspect.cleandoc(optimization.__doc__ or "").split()),
        "helps": optimization.helps,
        "risk": optimization.risk,
        "numbers": optimization.effect.value,
        "values": "; ".join(values) or ", ".join(optimization.words) or optimization.free,
        "more": optimization.page,
    }
    here = [
        ("here", f"{name} {outcome(one)[0].partition(' ')[2]}: {word(one.value)}; {one.reason}")
        for name, one in decisions.items()
    ]
    headline = f"{optimization.name}: {optimization.summary}"
    return Document(headline, [Table(("", ""), [*here, *about.items()])])


# --- the panel ---


def state_report(preview: Preview, name: str, found: Tuning | None = None) -> Document:
    """Return a report of the plan in force and the changes that Apply would make, with reasons."""
    plan, applied = preview.plan, preview.applied
    would = values_text(plan) or "nothing"
    headline = f"Nothing is applied to `{name}`. Apply would turn on: {would}"
    if applied is not None:
        headline = f"Applied to `{name}`: {values_text(applied.plan) or 'nothing'}"
        headline += f". Apply would make it: {would}" if preview.pending else ""
    pinned = plan.hardware.pinned
    headline += f" ({machines.as_for(pinned)})" if pinned else ""
    was_on = {one.name for one in applied.plan if one.active} if applied else set()
    shown = [one for one in plan if one.active or one.declined or one.name in was_on]
    left = [one for one in plan if one not in shown]
    why, as_is = (decision_table(some, IN_PANEL, pending=preview) for some in (shown, left))
    content = [
        None if applied is None else _changed(applied),
        Section(why, "Why"),
        Section(as_is, f"{len(left)} left as they are, and why", folded=True),
        worth_measuring(plan, found),
    ]
    return Document(headline, content, is_brief=True)


def panel_report(
    preview: Preview, name: str, message: str, result: Document | None, found: Tuning | None
) -> Document:
    """Return a panel's content as one report, for front ends without widgets."""
    state = state_report(preview, name, found)
    content = [message, *state.content]
    if result is not None and result.sections:
        first, *tail = result.sections
        content += [replace(first, title=result.headline), *tail]
    return Document(f"SpeedKit · {state.headline}", content, is_brief=True)


def _marked(preview: Preview, one: Decision, state: str) -> tuple[str, str]:
    """Return a decision's state and value, marked if Apply would change them: `→ on`, `● bf16`."""
    now, value = preview.applied.plan if preview.applied else None, word(one.value)
    was_on = now is not None and now[one.name].active
    if (one.active, one.value) != (was_on, now[one.name].value if now else one.value):
        state = "→ on" if one.active else "→ off" if was_on else state
        value = TableCell(value, changed=True) if now is not None or one.active else value
    return state, value


# --- code ---


def code_report(
    plan: Plan | SpeedContext,
    form: str,
    optimizers: Optimizers,
    name: str,
    model: torch.nn.Module | None = None,
    names: Mapping[str, Any] | None = None,
) -> Document:
    """Return a plan as code. `name` is the model's expression, `names` the notebook's variables."""
    text = code(plan, form, optimizers, model=model, name=name, names=names)
    titles = {"torch": "plain PyTorch", "transformers": "Transformers", "yaml": "a config"}
    title = titles.get(form, f"a script for {form}")
    body = CodeBlock(text.rstrip("\n"), is_file=True)
    return Document(f"The plan for `{name}` as {title}", [body], {"form": form, "code": text})
