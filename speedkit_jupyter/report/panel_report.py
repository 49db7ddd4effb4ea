"""What a panel shows: the plan that is chosen, before and after, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speedkit_jupyter import machines
from speedkit_jupyter.codegen.forms import code
from speedkit_jupyter.optimizations.base.decision import Decision
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.plans.preview import Preview
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Cell, Code, Folded, Row, Section, Table
from speedkit_jupyter.report.plan_report import called, outcome, spoken, worth_measuring
from speedkit_jupyter.report.units import word
from speedkit_jupyter.session import Found
from speedkit_jupyter.support.exceptions import SpeedKitError

if TYPE_CHECKING:
    import torch


def state_report(preview: Preview, name: str, found: Found | None = None) -> Document:
    """Return what is applied, what the choice would change, and why."""
    plan, applied = preview.plan, preview.applied
    would = spoken(plan) or "nothing"
    if applied is None:
        headline = f"Nothing is applied to `{name}`. Apply would turn on: {would}"
    else:
        headline = f"Applied to `{name}`: {spoken(applied.plan) or 'nothing'}"
        headline += f". Apply would make it: {would}" if preview.pending else ""
    if plan.hardware.pinned:
        headline += f" ({machines.as_for(plan.hardware.pinned)})"
    content = [changes(preview), *_reasons(preview), worth_measuring(plan, found)]
    return Document(headline, content, is_brief=True)


def panel_report(
    preview: Preview,
    name: str,
    message: str = "",
    result: Document | None = None,
    found: Found | None = None,
) -> Document:
    """Return all that a panel shows, for front ends without widgets."""
    state = state_report(preview, name, found)
    content = [message, *state.content]
    if result is not None and result.sections:
        first, *tail = result.sections
        content += [replace(first, title=result.headline), *tail]
    return Document(f"SpeedKit · {state.headline}", content, is_brief=True)


def changes(preview: Preview) -> Table | str:
    """Return flags and state: as found, as they are, and as they would be."""
    titles = ["flag or state", "before", "now", "after Apply"]
    shown = [0, 1, 2, 3]
    if preview.applied is None:
        shown.remove(2)
    elif not preview.pending:
        shown.remove(3)
    rows = []
    for name, before, now, after in preview.rows():
        cells = (name, word(before), _marked(before, now), _marked(now, after))
        rows.append(tuple(cells[at] for at in shown))
    columns = tuple(titles[at] for at in shown)
    same = "Every flag, the model and its optimizers would stay as they are."
    return Table(columns, rows, wraps=columns) if rows else same


def _reasons(preview: Preview) -> list[Section]:
    """One row for each decision; those that leave something as it is lie folded."""
    columns = ("optimization", "state", "value", "why")
    now = preview.applied.plan if preview.applied else None
    rows: dict[bool, list[Row]] = {True: [], False: []}
    for one in preview.plan:
        was_on = now is not None and now[one.name].active
        rows[one.active or one.declined or was_on].append(_reason(one, now))
    folded = Folded(Table(columns, rows[False]), f"{len(rows[False])} left as they are, and why")
    return [Section(Table(columns, rows[True]), "Why"), Section(folded)]


def _reason(decision: Decision, applied: Plan | None) -> Row:
    """`● on` is what is in force, `→ on` what would be; what differs is marked."""
    state, tone = outcome(decision)
    value, now = word(decision.value), applied[decision.name] if applied else None
    was_on = now is not None and now.active
    if (decision.active, decision.value) != (was_on, now.value if now else decision.value):
        state = "→ on" if decision.active else "→ off" if was_on else state
        value = Cell(value, changed=True) if now is not None or decision.active else value
    return Row((called(decision), state, value, decision.reason), tone)


def unavailable(decisions: Mapping[str, Decision]) -> list[tuple[list[str], str]]:
    """Return the words that can't be had here, those with one reason together."""
    groups: dict[str, tuple[list[str], str]] = {}
    for asked, decision in decisions.items():
        if decision.declined:
            key = decision.reason.replace(repr(asked), "")
            groups.setdefault(key, ([], decision.reason))[0].append(asked)
    return list(groups.values())


def as_code(
    plan: Plan,
    optimizers: Sequence[torch.optim.Optimizer],
    model: torch.nn.Module | None = None,
    name: str = "model",
) -> Document:
    """Return the plan to take along, in the user's word for the model."""
    text: Any
    try:
        written = code(plan, "torch", optimizers, model=model, name=name)
        text = Code(written.rstrip(), "python")
    except SpeedKitError as error:
        text = str(error)
    yaml = Section(Code(plan.to_yaml().rstrip()), "As YAML (`%speedkit config load FILE`)")
    return Document("The plan", [Section(text, "As plain PyTorch"), yaml])


def _marked(before: Any, after: Any) -> str:
    return word(after) if before == after else Cell(word(after), changed=True)
