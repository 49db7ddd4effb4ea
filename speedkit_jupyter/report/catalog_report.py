"""Reports about the catalog: what there is, and what one entry does."""

from __future__ import annotations

import inspect

from speedkit_jupyter.optimizations import named
from speedkit_jupyter.optimizations.base.decision import Decision
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.report.attention_table import evidence
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Row, Section, Table
from speedkit_jupyter.report.plan_report import hardware_line, outcome, worth_measuring
from speedkit_jupyter.report.units import word


def catalog_report(plan: Plan, name: str) -> Document:
    """Every entry: what it does, and what would be on, as is or declined here."""
    rows = tuple(_row(decision) for decision in plan)
    table = Table(
        ("optimization", "what it does", "state", "value", "why"), rows, wraps=WRAPS, least_last=38
    )
    more = Section("`%speedkit explain NAME` says where one helps, its risk, and how it is undone.")
    return Document(
        f"The catalog for {name} on {hardware_line(plan.hardware, plan.facts.device)}",
        (Section(table), *worth_measuring(plan), more),
        {"plan": plan.to_dict()},
    )


WRAPS = ("what it does",)


def _row(decision: Decision) -> Row:
    state, tone = outcome(decision)
    summary = named(decision.name).summary
    return Row((decision.name, summary, state, word(decision.value), decision.reason), tone)


def explain_report(optimization: Optimization, decision: Decision, name: str) -> Document:
    """One entry, and what is decided about it for this model."""
    state, _ = outcome(decision)
    about = {
        "what": " ".join(inspect.cleandoc(optimization.__doc__ or "").split()),
        "helps": optimization.helps,
        "risk": optimization.risk,
        "numbers": optimization.effect.value,
        "undone": optimization.undone,
        "values": _values(optimization),
        "here": f"{name} {state.partition(' ')[2]}: {word(decision.value)}; {decision.reason}",
        "more": optimization.page,
    }
    table = Table(("", ""), tuple(Row(row) for row in about.items()))
    return Document(
        f"{optimization.name}: {optimization.summary}",
        (Section(table), *evidence([decision])),
        about
        | {"name": optimization.name, "effect": optimization.effect.value}
        | ({"evidence": [row.to_dict() for row in decision.evidence]} if decision.evidence else {}),
    )


def _values(optimization: Optimization) -> str:
    """What its option takes; of several fields the first one's values, then the others by name."""
    first, *others = [(name, info.description) for name, info in optimization.fields.items()] or [
        ("", ", ".join(optimization.words) or optimization.free)
    ]
    return "; ".join([str(first[1]), *(f"{name}: {values}" for name, values in others)])
