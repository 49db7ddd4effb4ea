"""What a panel shows: the plan that is chosen, before and after, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speedkit_jupyter import machines
from speedkit_jupyter.codegen.forms import code
from speedkit_jupyter.optimizations.base.decision import Decision
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.plans.preview import Preview
from speedkit_jupyter.plans.sources import ALONE
from speedkit_jupyter.report.comparison_report import narrow_comparison_report
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import (
    Changed,
    Code,
    Folded,
    Picture,
    Row,
    Section,
    Table,
)
from speedkit_jupyter.report.plan_report import called, outcome, spoken, worth_measuring
from speedkit_jupyter.report.units import word
from speedkit_jupyter.session import Found
from speedkit_jupyter.support.exceptions import SpeedKitError

if TYPE_CHECKING:
    import torch


def state_report(preview: Preview, name: str, found: Found | None = None) -> Document:
    """Return what is applied, what the choice would change, and why."""
    sections = [Section(changes(preview)), *reasons(preview)]
    sections += worth_measuring(preview.plan, found)
    headline, pinned = _headline(preview, name), preview.plan.hardware.pinned
    if pinned:
        headline += f" ({machines.as_for(pinned)})"
    return Document(headline, tuple(sections), {"plan": preview.plan.to_dict()}, is_brief=True)


def panel_report(
    preview: Preview,
    name: str,
    message: str = "",
    result: Document | None = None,
    found: Found | None = None,
) -> Document:
    """Return all that a panel shows, for front ends without widgets."""
    state = state_report(preview, name, found)
    config = preview.plan.config
    chosen = [f"{k} {word(v)}" for k, v in config.to_dict().items() if k != ALONE]
    rest = "auto for all else" if chosen else "auto for everything"
    rest = "all else as it is" if config.is_alone else rest
    sections = [Section(f"Chosen: {', '.join([*chosen, rest])}.")]
    sections += [Section(message)] if message else []
    sections += state.sections
    refused = tuple(
        Row((f"{name} {', '.join(words)}", why))
        for name, decisions in preview.words.items()
        for words, why in unavailable(decisions)
    )
    if refused:
        table = Table(("not here", "why"), refused)
        sections.append(Section(Folded(table, f"{len(refused)} that can't be had here, and why")))
    if result is not None:
        first, *tail = result.sections or [Section("")]
        sections += [replace(first, title=result.headline), *tail]
    return Document(f"SpeedKit · {state.headline}", tuple(sections), state.data, is_brief=True)


def changes(preview: Preview) -> Table | str:
    """Return flags and state: as found, as they are, and as they would be."""
    rows = preview.rows()
    if not rows:
        return "Every flag, the model and its optimizers would stay as they are."
    columns: tuple[str, ...] = ("flag or state", "before", "now", "after Apply")
    cells: list[tuple[str, ...]] = [
        (name, word(before), _marked(before, now), _marked(now, after))
        for name, before, now, after in rows
    ]
    if preview.applied is None or not preview.pending:
        left_out = 2 if preview.applied is None else 3
        columns, *cells = (one[:left_out] + one[left_out + 1 :] for one in (columns, *cells))
    return Table(columns, tuple(map(Row, cells)), wraps=columns)


def reasons(preview: Preview) -> list[Section]:
    """Return one row for each decision; what is left as it is lies folded.

    What differs from the plan in force is marked.
    """
    columns = ("optimization", "state", "value", "why")
    rows = [(_is_left(decision, preview), _reason(decision, preview)) for decision in preview.plan]
    first = tuple(row for is_left, row in rows if not is_left)
    rest = tuple(row for is_left, row in rows if is_left)
    folded = Folded(Table(columns, rest), f"{len(rest)} left as they are, and why")
    return [Section(Table(columns, first), "Why")] * bool(first) + [Section(folded)] * bool(rest)


def unavailable(decisions: dict[str, Decision] | Any) -> list[tuple[list[str], str]]:
    """Return the words that can't be had here, those with one reason together."""
    groups: dict[str, tuple[list[str], str]] = {}
    for asked, decision in decisions.items():
        if decision.declined:
            key = decision.reason.replace(repr(asked), "")
            groups.setdefault(key, ([], decision.reason))[0].append(asked)
    return list(groups.values())


def result_report(result: Any) -> Document:
    """Return a result for the panel, drawn now: a search would keep its model alive."""
    from speedkit_jupyter.measure.results.comparison import Comparison

    is_comparison = isinstance(result, Comparison)
    document = narrow_comparison_report(result) if is_comparison else result.report().brief()
    sections = tuple(replace(section, body=_drawn(section.body)) for section in document.sections)
    return replace(document, sections=sections)


def as_code(
    plan: Plan,
    optimizers: Sequence[torch.optim.Optimizer],
    model: torch.nn.Module | None = None,
    name: str = "model",
) -> Iterable[Section]:
    """Return the plan to take along, in the user's word for the model."""
    try:
        text = code(plan, "torch", optimizers, model=model, name=name)
        yield Section(Code(text.rstrip(), "python"), "As plain PyTorch")
    except SpeedKitError as error:
        yield Section(str(error), "As plain PyTorch")
    yield Section(Code(plan.to_yaml().rstrip()), "As YAML (`%speedkit config load FILE`)")


def _headline(preview: Preview, name: str) -> str:
    applied, would = preview.applied, spoken(preview.plan) or "nothing"
    if applied is None:
        return f"Nothing is applied to `{name}`. Apply would turn on: {would}"
    now = f"Applied to `{name}`: {spoken(applied.plan) or 'nothing'}"
    return f"{now}. Apply would make it: {would}" if preview.pending else now


def _is_left(decision: Decision, preview: Preview) -> bool:
    """Whether nothing is, was or would be done."""
    now = None if preview.applied is None else preview.applied.plan[decision.name]
    return not (decision.active or decision.declined or (now is not None and now.active))


def _reason(decision: Decision, preview: Preview) -> Row:
    """`● on` is what is in force, `→ on` what would be."""
    state, tone = outcome(decision)
    value = word(decision.value)
    now = None if preview.applied is None else preview.applied.plan[decision.name]
    was_on = now is not None and now.active
    if (decision.active, decision.value) != (was_on, now.value if now else decision.value):
        state = "→ on" if decision.active else "→ off" if was_on else state
        value = Changed(value) if preview.applied is not None or decision.active else value
    return Row((called(decision), state, value, decision.reason), tone)


def _marked(before: Any, after: Any) -> str:
    return word(after) if before == after else Changed(word(after))


def _drawn(body: Any) -> Any:
    if not isinstance(body, Picture):
        return body
    data = body.png()
    return Picture(lambda: data, body.text)
